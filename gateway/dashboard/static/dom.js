// Elements made and changed with as little touching of the page as possible.

const SVG = "http://www.w3.org/2000/svg";

function put(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) element.removeAttribute(name);
    else if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
  }
  return element;
}

export function h(tag, attributes = {}, ...children) {
  const element = put(document.createElement(tag), attributes);
  element.append(...children);
  return element;
}

export function s(tag, attributes = {}, ...children) {
  const element = put(document.createElementNS(SVG, tag), attributes);
  element.append(...children);
  return element;
}

export { put };

export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// Children of `parent`, one for each item by its key, in order; made once and then updated.
export function keyed(parent, items, key, make, update) {
  const known = (parent.known ??= new Map());
  const wanted = new Set();
  let at = parent.firstElementChild;
  for (const item of items) {
    const name = key(item);
    wanted.add(name);
    let element = known.get(name);
    if (!element) {
      element = make(item);
      known.set(name, element);
    }
    update(element, item);
    if (element === at) at = at.nextElementSibling;
    else parent.insertBefore(element, at);
  }
  for (const [name, element] of known) {
    if (!wanted.has(name)) {
      element.remove();
      known.delete(name);
    }
  }
}

export function rowOf(cells, header = 0) {
  const row = h("tr");
  for (let at = 0; at < cells; at += 1) {
    row.append(at === header ? h("th", { scope: "row" }) : h("td"));
  }
  return row;
}

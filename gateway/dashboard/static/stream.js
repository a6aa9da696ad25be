// The gateway's events, read again and again for as long as the page is open.

const PATH = "/prfaas/dashboard/events";
const SILENT_MS = 10000;
const FIRST_PAUSE_MS = 500;
const LAST_PAUSE_MS = 8000;
const REFUSALS = {
  401: "the gateway asks for an admin's key; load the page again",
  403: "the key is not an admin's",
  503: "too many dashboards are open",
};

// Calls on[name](data) for each event, and on.lost(text) when the gateway cannot be followed. A stream
// that ends in order is opened again at once: the gateway ends them now and then, to see the key anew.
export async function follow(on) {
  let pause = FIRST_PAUSE_MS;
  for (;;) {
    let why = "";
    try {
      const aborter = new AbortController();
      const response = await fetch(PATH, { signal: aborter.signal, cache: "no-store" });
      if (response.ok) {
        const began = Date.now();
        await read(response.body, on, aborter);
        if (Date.now() - began > LAST_PAUSE_MS) {
          pause = FIRST_PAUSE_MS;
          continue;
        }
        why = "the gateway closed the stream";
      } else {
        why = REFUSALS[response.status] ?? `the gateway answered ${response.status}`;
      }
    } catch (error) {
      why = error.name === "AbortError" ? "the gateway is silent" : "the gateway is not reached";
    }
    on.lost(why);
    await new Promise((done) => setTimeout(done, pause * (0.5 + Math.random() / 2)));
    pause = Math.min(LAST_PAUSE_MS, 2 * pause);
  }
}

async function read(body, on, aborter) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  let timer = 0;
  try {
    for (;;) {
      clearTimeout(timer);
      timer = setTimeout(() => aborter.abort(), SILENT_MS);
      const { done, value } = await reader.read();
      if (done) return;
      text += value;
      let end = text.indexOf("\n\n");
      while (end >= 0) {
        dispatch(text.slice(0, end), on);
        text = text.slice(end + 2);
        end = text.indexOf("\n\n");
      }
    }
  } finally {
    clearTimeout(timer);
  }
}

function dispatch(block, on) {
  let name = "";
  let data = "";
  for (const line of block.split("\n")) {
    if (line.startsWith("event: ")) name = line.slice(7);
    else if (line.startsWith("data: ")) data += line.slice(6);
  }
  if (on[name]) on[name](JSON.parse(data));
}

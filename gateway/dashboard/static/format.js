// Numbers as people read them; an absent number is a dash.

export const DASH = "–";

export function seconds(value) {
  if (value === null || value === undefined) return DASH;
  const size = Math.abs(value);
  if (size === 0) return "0 s";
  if (size < 0.001) return `${(value * 1e6).toFixed(0)} µs`;
  if (size < 0.0995) return `${(value * 1e3).toFixed(size < 0.00995 ? 1 : 0)} ms`;
  if (size < 99.5) return `${value.toFixed(size < 9.95 ? 2 : 1)} s`;
  return duration(value);
}

export function duration(value) {
  const whole = Math.round(value);
  if (whole < 120) return `${whole} s`;
  if (whole < 7200) return `${Math.round(whole / 60)} min`;
  if (whole < 172800) return `${Math.round(whole / 3600)} h`;
  return `${Math.round(whole / 86400)} d`;
}

function scaled(value, units, base) {
  let size = value;
  for (const unit of units) {
    if (Math.abs(size) < base * 0.9995 || unit === units.at(-1)) {
      const digits = unit === units[0] || size >= 99.5 ? 0 : size >= 9.95 ? 1 : 2;
      return [size.toFixed(digits), unit];
    }
    size /= base;
  }
  return [String(value), ""];
}

export function bytes(value) {
  if (!value) return value === 0 ? "0" : DASH;
  return scaled(value, ["B", "kB", "MB", "GB", "TB", "PB"], 1000).join(" ");
}

export function rate(value) {
  return value ? `${bytes(value)}/s` : DASH;
}

export function count(value) {
  if (value === null || value === undefined) return DASH;
  return scaled(value, ["", "k", "M", "G"], 1000).join("");
}

export function percent(part, whole = 1) {
  return whole ? `${Math.round((100 * part) / whole)}%` : DASH;
}

export function time(at) {
  return new Date(at * 1000).toLocaleTimeString([], { hour12: false });
}

const REASONS = {
  offload_off: "offloading is off",
  feature: "asks for something that cannot leave",
  too_short: "too short to be worth it",
  mostly_cached: "mostly cached at the engine",
  no_cache_info: "the engine's cache is unknown",
  no_peer: "no instance is ready",
  stale: "telemetry is too old",
  unmeasured: "not measured yet",
  no_space: "no space for its KV",
  local_faster: "local is faster",
  remote_faster: "remote is faster",
  local_cheaper: "local is cheaper",
  remote_cheaper: "remote is cheaper",
  below_threshold: "below the threshold",
  above_threshold: "above the threshold",
  balanced: "balanced at random",
  local_busy: "local is busy",
  no_budget: "the link's budget is full",
  forced_local: "always local",
  forced_remote: "always remote",
};

export function reason(word) {
  return REASONS[word] ?? word.replaceAll("_", " ");
}

export function words(name) {
  return name.replaceAll("_", " ");
}

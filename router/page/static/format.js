// Numbers and times for people.

const WHOLE = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

/** 12345 → "12,345". */
export function count(number) {
  return WHOLE.format(number);
}

/** "1 token", "2 tokens". */
export function plural(number, noun) {
  return `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
}

/** A time in ms: "0.4 ms", "12 ms", "1.24 s", "2 min 5 s". */
export function duration(ms) {
  if (ms < 10) return `${ms.toFixed(1)} ms`;
  if (ms < 1000) return `${ms.toFixed(0)} ms`;
  if (ms < 60_000) return `${(ms / 1000).toFixed(2)} s`;
  const seconds = Math.round(ms / 1000);
  return `${Math.floor(seconds / 60)} min ${seconds % 60} s`;
}

/** A number of bytes: "512 B", "1.5 MiB". */
export function bytes(number) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (number >= 1024 && unit < units.length - 1) {
    number /= 1024;
    unit += 1;
  }
  return `${number >= 100 || unit === 0 ? number.toFixed(0) : number.toFixed(1)} ${units[unit]}`;
}

/** A rate with one decimal, or none from 100 on. */
export function rate(number) {
  return number >= 100 ? count(number) : number.toFixed(1);
}

/** 0.123 → "12 %". */
export function percent(share) {
  return `${(100 * share).toFixed(0)} %`;
}

/** The time of day of a date in ms. */
export function clock(at) {
  return new Date(at).toLocaleTimeString("en-GB");
}

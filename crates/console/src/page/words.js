// Formats names, numbers and times. Clients choose the names, so the page inserts them as text,
// never as markup.

/** Creates an element with attributes and children. Children are nodes or text. */
export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

// Characters that are invisible, or that change the direction of the text around them: format
// characters, separators, characters that are ignored by default, the blank Braille pattern, and
// unusual spaces.
const unseen = /[\p{Cf}\p{Zl}\p{Zp}\p{Co}\p{Cn}\p{DI}\u2800]|^ | $|(?<= ) |(?! )\p{Zs}/gu;

/** Formats a name. Shows invisible characters, and isolates the direction of the text. */
export function name(text) {
  const made = element("bdi", { class: "name" });
  let end = 0;
  for (const found of text.matchAll(unseen)) {
    made.append(text.slice(end, found.index));
    const code = found[0].codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
    made.append(element("span", { class: "unseen" }, `U+${code}`));
    end = found.index + found[0].length;
  }
  made.append(text.slice(end));
  return made;
}

/** Formats a token in groups of three digits. A copied token is the plain number. */
export function token(number) {
  const digits = String(number);
  const made = element("span", { class: "token" });
  const first = digits.length % 3 || 3;
  made.append(digits.slice(0, first));
  for (let at = first; at < digits.length; at += 3) {
    made.append(element("span", { class: "group" }, digits.slice(at, at + 3)));
  }
  return made;
}

const units = [
  [86_400_000, "day", "days"],
  [3_600_000, "h", "h"],
  [60_000, "min", "min"],
  [1_000, "s", "s"],
];

/** Formats a duration, in at most two units. */
export function time(ms) {
  if (ms < 10_000) return `${(Math.max(ms, 0) / 1_000).toFixed(1)} s`;
  const at = units.findIndex(([length]) => ms >= length);
  const [length, one, many] = units[at];
  const count = Math.floor(ms / length);
  const first = `${count} ${count === 1 ? one : many}`;
  if (at + 1 >= units.length || count >= 10) return first;
  const [next, nextOne, nextMany] = units[at + 1];
  const rest = Math.floor((ms % length) / next);
  return rest === 0 ? first : `${first} ${rest} ${rest === 1 ? nextOne : nextMany}`;
}

const day = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short" });
const clock = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });

/** Formats a time of day, with the date if it is not today. The tooltip shows the time in UTC. */
export function moment(ms) {
  const date = new Date(ms);
  const utc = date.toISOString();
  const isToday = date.toDateString() === new Date().toDateString();
  const said = isToday ? clock.format(date) : `${day.format(date)}, ${clock.format(date)}`;
  return element("time", { datetime: utc, title: utc }, said);
}

/** Returns the name of an owner, or "unnamed". */
export const owner = (text) => (text ? name(text) : element("span", { class: "soft" }, "unnamed"));

/** Describes the holder of a lease, and the time of the grant if the store records it. */
export function holder({ held_lease: lease, now_ms }) {
  if (!lease) return ["The lease is not held."];
  const said = [owner(lease.owner), " holds it now, with token ", token(lease.token)];
  if (lease.granted_at === undefined) return [...said, "."];
  const at = Date.parse(lease.granted_at);
  return [...said, ", since ", moment(at), ` (for ${time(now_ms - at)}).`];
}

export const number = (count) => count.toLocaleString("en").replaceAll(",", "\u2009");

/** Shows an error, or clears the notice. */
export function notice(place, error) {
  place.hidden = !error;
  const said = error ? error.message : "";
  if (place.textContent !== said) place.textContent = said;
}

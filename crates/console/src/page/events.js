// The events, newest first. A stale token is shown with its explanation.

import { inspect } from "./api.js";
import { lookUp } from "./dialogs.js";
import { element, holder, moment, name, owner, time, token } from "./words.js";

/** The maximum number of listed events of leases, of other events, and of notes. */
const MOST = 200;
const ANNOUNCE_EVERY_MS = 5_000;
const EXPLAIN_EVERY_MS = 1_000;
const OTHER_PROCESS = "The events from here on are from another process, or from this one after a restart.";
/** An entry of `paused`: the next events are from another process. */
const BOUNDARY = {};

const list = document.getElementById("live-events");
const empty = document.getElementById("live-empty");
const pause = document.getElementById("live-pause");
const show = document.getElementById("live-show");
const announce = document.getElementById("live-announce");

const refusals = new Set(["stale", "forged", "refused", "lost", "superseded"]);
export const ofLeases = new Set(["waiting", "granted", "released", "lost", "broken", "superseded"]);

/** The grants that this page has seen, by token and resource. */
const grants = new Map();
/** The new events during a pause; null without a pause. */
let paused = null;
/** The number of events that were not kept during the pause. */
let missed = 0;
let explainedAt = -Infinity;

const words = {
  admitted: (event) => [event.read ? "read" : "written", " with ", token(event.token)],
  stale: (event) =>
    event.used
      ? ["refused: ", token(event.token), " was used already"]
      : [
          "refused: presented ", token(event.token), ", highest stale token ", token(event.max_token),
          event.by_floor ? " (the floor of its partition)" : "",
        ],
  forged: (event) => ["refused: ", token(event.token), " is not signed by the issuer"],
  refused: (event) => [`refused: ${event.problem.replaceAll("-", " ")}`],
  waiting: (event) => [owner(event.owner), " waits in the queue"],
  granted: (event) =>
    event.waited_ms === undefined
      ? ["granted to ", owner(event.owner), ", token ", token(event.token)]
      : ["granted to ", owner(event.owner), ", token ", token(event.token), `, after ${time(event.waited_ms)} in the queue`],
  released: () => ["released"],
  lost: () => ["lease lost"],
  broken: () => ["broken by an operator"],
  superseded: (event) => ["token ", token(event.token), " is too low for the fence; the grant is retried from ", token(event.next)],
};

/** Shows the new events. */
export function take(news) {
  const isOther = news.hello && !news.hello.goes_on;
  for (const event of news.events) {
    if (event.kind === "granted") remember(event);
  }
  if (paused) {
    if (isOther) paused.push(BOUNDARY);
    paused.push(...news.events);
    const group = (event) => (event === BOUNDARY ? null : ofLeases.has(event.kind));
    const old = new Set(surplus([...paused].reverse(), group));
    paused = paused.filter((event) => !old.has(event));
    missed += news.missed + old.size;
    return;
  }
  if (isOther) noteOtherProcess();
  // Keeps the position of a user who has scrolled down. Read only once, because reading it forces a
  // layout.
  const [scrolled, before] = [list.scrollTop, list.scrollHeight];
  noteMissed(news.missed);
  const last = news.events.findLast((event) => event.kind === "stale");
  for (const event of news.events) add(event, event === last);
  trim();
  if (scrolled > 0) list.scrollTop = scrolled + list.scrollHeight - before;
  // The first message contains earlier events.
  if (!isOther) announceRefusals(news.events.filter((event) => refusals.has(event.kind)));
}

/** Returns the items beyond the newest `MOST` of their group. */
function surplus(newestFirst, group) {
  const counts = new Map();
  return newestFirst.filter((item) => {
    const count = (counts.get(group(item)) ?? 0) + 1;
    counts.set(group(item), count);
    return count > MOST;
  });
}

/** Removes the oldest items of each group, so that many writes do not displace events of leases. */
function trim() {
  for (const item of surplus([...list.children], (item) => item.dataset.lease)) remove(item);
  // Notes whose events were removed may have become neighbours.
  for (const older of list.querySelectorAll("[data-missed] + [data-missed]")) {
    const newer = older.previousElementSibling;
    newer.replaceWith(missedNote(Number(newer.dataset.missed) + Number(older.dataset.missed)));
    older.remove();
  }
  while (list.lastElementChild?.matches(".note + .note")) list.lastElementChild.remove();
}

/** Removes a part of the list. If the part has the focus, the focus moves to the list. */
function remove(part) {
  if (part.contains(document.activeElement)) list.focus({ preventScroll: true });
  part.remove();
}

function remember(event) {
  grants.set(`${event.token} ${event.resource}`, event);
  if (grants.size > 2_000) grants.delete(grants.keys().next().value);
}

function add(event, atOnce = false) {
  // The event may be from a process that has a later version.
  if (!(event.kind in words)) return;
  const same = JSON.stringify({ ...event, id: 0, at_ms: 0 });
  const newest = list.firstElementChild;
  if (newest?.dataset.same === same) {
    const times = Number(newest.dataset.times ?? 1) + 1;
    newest.dataset.times = times;
    newest.querySelector(".times").textContent = `\u00d7${times}`;
    newest.querySelector("time").replaceWith(moment(event.at_ms));
    if (event.kind === "stale" && atOnce && isDue()) {
      remove(newest.querySelector(".why"));
      explain(event, newest, atOnce);
    }
    return;
  }
  const item = element("li", {
    class: "event",
    "data-kind": event.kind,
    "data-same": same,
    "data-refusal": String(refusals.has(event.kind)),
    "data-lease": String(ofLeases.has(event.kind)),
  });
  const about = event.resource
    ? button(event.resource)
    : element("span", { class: "soft" }, "a request");
  const said = element("span", { class: "said" }, ...words[event.kind](event));
  item.append(moment(event.at_ms), element("p", {}, about, " ", said, " ", element("span", { class: "times" })));
  if (event.kind === "stale") explain(event, item, atOnce);
  put(item);
}

function button(resource) {
  const made = element("button", { type: "button", class: "link" }, name(resource));
  made.addEventListener("click", () => lookUp(resource));
  return made;
}

function noteMissed(count) {
  if (count > 0) put(missedNote(count));
}

function missedNote(count) {
  const made = note(`${count} events were too many to list; the counts above include them.`);
  made.dataset.missed = count;
  return made;
}

/** Notes that the next events are from another process, unless the list has no earlier event. */
function noteOtherProcess() {
  const newest = list.firstElementChild;
  if (newest && newest.textContent !== OTHER_PROCESS) put(note(OTHER_PROCESS));
}

function note(text) {
  return element("li", { class: "event note" }, element("p", {}, text));
}

function put(item) {
  empty.hidden = true;
  list.prepend(item);
}

/**
 * Adds the grant of the presented token and the current holder of the lease. For the newest
 * refusal, the page looks up the holder, at most once a second. For other refusals, it shows a
 * button.
 */
function explain(event, item, atOnce) {
  const text = element("p", { class: "why" });
  item.append(text);
  const granted = grants.get(`${event.token} ${event.resource}`);
  if (granted) {
    text.append("It was granted to ", owner(granted.owner), " at ", moment(granted.at_ms), ". ");
  }
  if (atOnce && isDue()) {
    explainedAt = performance.now();
    tellHolder(event.resource, text);
    return;
  }
  const ask = element("button", { type: "button", class: "link" }, "Show the current holder");
  ask.addEventListener(
    "click",
    async () => {
      await tellHolder(event.resource, text);
      const hadFocus = ask === document.activeElement;
      ask.remove();
      if (!hadFocus) return;
      text.tabIndex = -1;
      text.focus();
    },
    { once: true },
  );
  text.append(ask);
}

/** Returns whether the page may look up another holder now. */
function isDue() {
  return performance.now() - explainedAt >= EXPLAIN_EVERY_MS;
}

async function tellHolder(resource, text) {
  try {
    const found = await inspect(resource);
    text.append("At ", moment(found.now_ms), ": ", ...holder(found));
  } catch (error) {
    text.append(error.message);
  }
}

let unannounced = [];
let announcing = null;

/** Announces refusals to screen readers, in one sentence for all since the last announcement. */
function announceRefusals(events) {
  unannounced.push(...events);
  if (announcing || unannounced.length === 0) return;
  const say = () => {
    announcing = null;
    if (unannounced.length === 0) return;
    const last = unannounced.at(-1);
    const count = unannounced.length;
    announce.textContent = `${count === 1 ? "One refusal" : `${count} refusals`}, most recent: ${last.resource ?? "a request"}, ${last.kind}.`;
    unannounced = [];
    announcing = setTimeout(say, ANNOUNCE_EVERY_MS);
  };
  say();
}

pause.addEventListener("click", () => {
  const events = paused;
  paused = paused ? null : [];
  pause.setAttribute("aria-pressed", String(paused !== null));
  pause.textContent = paused ? "Resume" : "Pause";
  noteMissed(missed);
  missed = 0;
  for (const event of events ?? []) {
    if (event === BOUNDARY) noteOtherProcess();
    else add(event);
  }
  trim();
});

show.addEventListener("change", () => {
  list.dataset.show = show.value;
});

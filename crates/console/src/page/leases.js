// The held leases, in pages.

import { get } from "./api.js";
import { lookUp, breakLease } from "./dialogs.js";
import { element, name, notice, number, owner, time, token } from "./words.js";

const EVERY_MS = 3_000;
const SOON_MS = 300;

const body = document.getElementById("leases-rows");
const summary = document.getElementById("leases-summary");
const failed = document.getElementById("leases-error");
const back = document.getElementById("leases-back");
const next = document.getElementById("leases-next");
const text = document.getElementById("leases-text");

/** The cursors of the pages up to the current one; null for the first. */
let cursors = [null];
let nextCursor = null;
let search = "";
let timer = null;
let asking = 0;
let isSoon = false;

/** The rows on the page, by resource and token. Their elements are reused, so that the focus stays. */
const rows = new Map();

export async function refresh() {
  clearTimeout(timer);
  isSoon = false;
  const asked = (asking += 1);
  try {
    const page = await get("leases", { search, cursor: cursors.at(-1) });
    if (asked !== asking) return;
    draw(page);
    notice(failed, null);
  } catch (error) {
    if (asked !== asking) return;
    // The cursor may have become invalid, for example after a restart of the store.
    if (cursors.length > 1) cursors = [null];
    notice(failed, error);
  }
  if (!document.hidden) timer = setTimeout(refresh, EVERY_MS);
}

/** Refreshes the list soon after a lease event. Further events before then have no effect. */
export function soon() {
  if (isSoon || document.hidden) return;
  isSoon = true;
  clearTimeout(timer);
  timer = setTimeout(refresh, SOON_MS);
}

function draw(page) {
  const now = performance.now();
  const shown = new Set();
  const leases = page.leases.sort((one, other) => (one.resource < other.resource ? -1 : 1));
  let place = body.firstElementChild;
  for (const lease of leases) {
    const key = `${lease.token} ${lease.resource}`;
    shown.add(key);
    const row = rows.get(key) ?? add(key, lease);
    row.until = now + lease.ttl_ms;
    row.longest = Math.max(row.longest, lease.ttl_ms);
    const waiters = lease.waiters === 0 ? "none" : number(lease.waiters);
    if (row.waiters.textContent !== waiters) row.waiters.textContent = waiters;
    row.waiters.classList.toggle("soft", lease.waiters === 0);
    if (row.element === place) place = place.nextElementSibling;
    else body.insertBefore(row.element, place);
  }
  for (const [key, row] of rows) {
    if (shown.has(key)) continue;
    const hadFocus = row.element.contains(document.activeElement);
    row.element.remove();
    rows.delete(key);
    if (hadFocus) document.getElementById("leases-title").focus();
  }
  nextCursor = page.cursor;
  back.disabled = cursors.length === 1;
  next.disabled = nextCursor === null;
  const count = leases.length;
  let said = count === 0 ? "No lease is held." : `${number(count)} on this page.`;
  if (search !== "") {
    said = `${count === 0 ? "None" : number(count)} found in ${number(page.looked_through)} leases.`;
    if (nextCursor !== null) said += " There are more leases to search.";
  }
  if (summary.textContent !== said) summary.textContent = said;
  tick();
}

function add(key, lease) {
  const left = element("span", { class: "left-text" });
  const fill = element("span", { class: "fill" });
  const waiters = element("td", { "data-label": "Waiters" });
  const resource = element("button", { type: "button", class: "link" }, name(lease.resource));
  resource.addEventListener("click", () => lookUp(lease.resource));
  const end = element("button", { type: "button", class: "small danger", "aria-label": `Break the lease on ${lease.resource}` }, "Break\u2026");
  end.addEventListener("click", () => breakLease(lease));
  const made = element(
    "tr",
    {},
    element("th", { scope: "row" }, resource),
    element("td", { "data-label": "Owner" }, owner(lease.owner)),
    element("td", { "data-label": "Token" }, token(lease.token)),
    element("td", { "data-label": "Time left", class: "left" }, element("span", { class: "track", "aria-hidden": "true" }, fill), left),
    waiters,
    element("td", { class: "action" }, end),
  );
  const row = { element: made, left, fill, waiters, until: 0, longest: 0 };
  rows.set(key, row);
  return row;
}

/** Updates the bars and the remaining times. */
function tick() {
  const now = performance.now();
  for (const row of rows.values()) {
    const left = Math.max(row.until - now, 0);
    const share = row.longest === 0 ? 0 : left / row.longest;
    row.fill.style.width = `${(share * 100).toFixed(1)}%`;
    row.fill.classList.toggle("short", share < 0.25);
    const said = time(Math.ceil(left / 1_000) * 1_000).replace(".0 s", " s");
    if (row.left.textContent !== said) row.left.textContent = said;
  }
}
setInterval(tick, 250);

back.addEventListener("click", () => {
  cursors.pop();
  refresh();
});
next.addEventListener("click", () => {
  if (nextCursor === null) return;
  cursors.push(nextCursor);
  refresh();
});
document.getElementById("leases-search").addEventListener("submit", (event) => {
  event.preventDefault();
  search = text.value;
  cursors = [null];
  refresh();
});
text.addEventListener("input", () => {
  if (text.value === "" && search !== "") text.form.requestSubmit();
});
document.addEventListener("visibilitychange", () => {
  if (!document.hidden) refresh();
});

// The held leases, in pages.

import { get } from "./api.js";
import { lookUp, breakLease } from "./dialogs.js";
import { pager } from "./pager.js";
import { element, name, number, owner, time, token } from "./words.js";

const text = document.getElementById("leases-text");

let search = "";

export const leases = pager("leases", {
  intervalMs: 3_000,
  // A search examines many leases.
  isAutomatic: () => search === "",
  async load(cursor) {
    const page = await get("leases", { search, cursor });
    return {
      items: page.leases.sort((one, other) => (one.resource < other.resource ? -1 : 1)),
      next: page.cursor,
      summary: summary(page, cursor),
    };
  },
  key: (lease) => `${lease.token} ${lease.resource}`,
  add,
  update,
});

function summary(page, cursor) {
  const count = page.leases.length;
  if (search === "") {
    if (count > 0) return `${number(count)} on this page.`;
    return cursor === null && page.cursor === null ? "No lease is held." : "None on this page.";
  }
  const found = `“${search}”: ${count === 0 ? "none" : number(count)} found in ${number(page.examined)} leases.`;
  const more = page.cursor === null ? "" : " There are more leases to search.";
  return `${found}${more} Search again to refresh the result.`;
}

function add(lease) {
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
  return { element: made, left, fill, waiters, until: 0, longest: 0 };
}

function update(row, lease) {
  row.until = performance.now() + lease.ttl_ms;
  row.longest = Math.max(row.longest, lease.ttl_ms);
  const waiters = lease.waiters === 0 ? "none" : number(lease.waiters);
  if (row.waiters.textContent !== waiters) row.waiters.textContent = waiters;
  row.waiters.classList.toggle("soft", lease.waiters === 0);
  tick(row);
}

/** Updates the bar and the remaining time. */
function tick(row) {
  const left = Math.max(row.until - performance.now(), 0);
  const share = row.longest === 0 ? 0 : left / row.longest;
  row.fill.style.width = `${(share * 100).toFixed(1)}%`;
  row.fill.classList.toggle("short", share < 0.25);
  const said = time(Math.ceil(left / 1_000) * 1_000).replace(".0 s", " s");
  if (row.left.textContent !== said) row.left.textContent = said;
}
setInterval(() => leases.rows.forEach(tick), 250);

document.getElementById("leases-search").addEventListener("submit", (event) => {
  event.preventDefault();
  search = text.value;
  leases.restart();
});
text.addEventListener("input", () => {
  if (text.value === "" && search !== "") text.form.requestSubmit();
});

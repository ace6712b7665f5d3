// A table that shows one page of a list. The pager refreshes the page and turns the pages.

import { notice } from "./words.js";

/** The minimum pause between a request and an automatic one after it. */
const PAUSE_MS = 1_000;

/**
 * Creates the pager of the table whose elements have ids that begin with `id`.
 *
 * `load(cursor)` requests a page, and returns its `items`, the cursor of the `next` page (null on
 * the last page), and a `summary`. `key(item)` identifies a row. `add(item)` creates a row with its
 * `element`, and `update(row, item)` fills it. The pager refreshes the list every `intervalMs`
 * milliseconds, and soon after a call to `soon()`, unless `isAutomatic()` returns false.
 */
export function pager(id, { intervalMs, load, key, add, update, isAutomatic = () => true }) {
  const [title, body, summary, failed, back, next] = ["title", "rows", "summary", "error", "back", "next"].map((part) =>
    document.getElementById(`${id}-${part}`),
  );
  /** The rows on the page, by key. Their elements are reused, so that the focus stays. */
  const rows = new Map();
  /** The cursors of the pages up to the shown one; null for the first. */
  let cursors = [null];
  /** The cursors of the pages up to the requested one. */
  let wanted = cursors;
  let nextCursor = null;
  /** Identifies the request in flight. The answer to an earlier request is ignored. */
  let current = null;
  /** Whether an item may have changed since the last request was sent. */
  let again = false;
  /** Whether the user has requested the page. Screen readers announce only such a page. */
  let isTurned = false;
  let timer = null;
  let endedAt = 0;
  let tookMs = 0;

  /** Requests the wanted page now. */
  async function refresh() {
    clearTimeout(timer);
    again = false;
    const mine = (current = {});
    const began = performance.now();
    try {
      const page = await load(wanted.at(-1));
      if (mine !== current) return;
      cursors = wanted;
      draw(page);
      notice(failed, null);
    } catch (error) {
      if (mine !== current) return;
      // A cursor may become invalid, for example after a restart of the store.
      if (error.field === "cursor" && wanted.length > 1) {
        turn([null]);
        return;
      }
      wanted = cursors;
      if (rows.size === 0) summary.textContent = "";
      notice(failed, error);
    }
    current = null;
    endedAt = performance.now();
    tookMs = endedAt - began;
    schedule();
  }

  function schedule() {
    clearTimeout(timer);
    if (document.hidden || !isAutomatic()) return;
    const pause = Math.max(again ? PAUSE_MS : intervalMs, tookMs);
    timer = setTimeout(refresh, endedAt + pause - performance.now());
  }

  /** Refreshes the list now, after a time without automatic refreshes. */
  function resume() {
    if (isAutomatic()) refresh();
  }

  /** Refreshes the list soon, because an item may have changed. */
  function soon() {
    again = true;
    if (current === null) schedule();
  }

  /** Requests another page. Until it is drawn, a second click requests the same page. */
  function turn(to) {
    wanted = to;
    isTurned = true;
    refresh();
  }

  /** Shows the first page of another list, for example of another search. */
  function restart() {
    cursors = [null];
    draw({ items: [], next: null, summary: "Searching\u2026" });
    turn(cursors);
  }

  function draw(page) {
    const shown = new Set();
    let place = body.firstElementChild;
    for (const item of page.items) {
      const name = key(item);
      shown.add(name);
      if (!rows.has(name)) rows.set(name, add(item));
      const row = rows.get(name);
      update(row, item);
      if (row.element === place) place = place.nextElementSibling;
      else body.insertBefore(row.element, place);
    }
    for (const [name, row] of rows) {
      if (shown.has(name)) continue;
      const hadFocus = row.element.contains(document.activeElement);
      row.element.remove();
      rows.delete(name);
      if (hadFocus) title.focus();
    }
    nextCursor = page.next;
    const focused = document.activeElement;
    back.disabled = cursors.length === 1;
    next.disabled = nextCursor === null;
    // A disabled button would lose the focus.
    if ((focused === back || focused === next) && focused.disabled) title.focus();
    const said = cursors.length === 1 ? page.summary : `Page ${cursors.length}: ${page.summary}`;
    summary.ariaLive = isTurned ? "polite" : "off";
    isTurned = false;
    if (summary.textContent !== said) summary.textContent = said;
  }

  back.addEventListener("click", () => turn(cursors.slice(0, -1)));
  next.addEventListener("click", () => turn([...cursors, nextCursor]));
  document.addEventListener("visibilitychange", () => {
    if (!document.hidden) resume();
  });
  return { rows, refresh, soon, resume, restart };
}

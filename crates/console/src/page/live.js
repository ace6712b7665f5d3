// The event stream of the process. It is open while the page is visible, and resumes after the last
// event that the page has received.

import { refusal, url } from "./api.js";

const PATIENCE_MS = 5_000;

/** Calls `state(name, text)` when the connection changes, and `news(message)` for each message. */
export function follow({ state, news }) {
  let source = null;
  let after = null;
  /** The id of the last event of each feed. */
  const lastIds = new Map();
  let failures = 0;
  let retry = null;
  let watchdog = null;

  function open() {
    stop();
    if (document.hidden) return;
    source = new EventSource(url("events", { after }));
    source.onmessage = (message) => {
      after = message.lastEventId;
      failures = 0;
      watch();
      state("live", "live");
      news(unseen(message));
    };
    // The process ends each stream after 10 seconds.
    source.addEventListener("end", open);
    // A browser closes the stream if the process has refused it.
    source.onerror = () => lost(source.readyState === EventSource.CLOSED);
    watch();
  }

  /**
   * Returns the message without the events that the page has already received. Behind a load
   * balancer, a stream may return to an earlier process, which then sends its recent events again.
   */
  function unseen(message) {
    const [feed, lastId] = message.lastEventId.split("-").map(Number);
    const data = JSON.parse(message.data);
    data.events = data.events.filter((event) => event.id > (lastIds.get(feed) ?? 0));
    lastIds.set(feed, lastId);
    return data;
  }

  /** Detects a half-open connection: the process sends at least one message a second. */
  function watch() {
    clearTimeout(watchdog);
    watchdog = setTimeout(() => lost(false), PATIENCE_MS);
  }

  async function lost(isRefused) {
    stop();
    failures += 1;
    const pause = Math.min(500 * 2 ** (failures - 1), 5_000);
    retry = setTimeout(open, pause);
    // If the process refuses the stream repeatedly, keep showing the reason instead of "connection
    // lost".
    if (!isRefused || failures === 1) state("lost", "connection lost, retrying");
    const reason = isRefused ? await refusal("events") : null;
    // The page may have become hidden or visible in the meantime.
    if (reason && !document.hidden && !source) state("lost", reason);
  }

  function stop() {
    clearTimeout(watchdog);
    clearTimeout(retry);
    source?.close();
    source = null;
  }

  document.addEventListener("visibilitychange", () => {
    if (document.hidden) {
      stop();
      state("paused", "paused");
    } else {
      open();
    }
  });
  addEventListener("pagehide", stop);
  addEventListener("pageshow", (event) => {
    if (event.persisted) open();
  });
  open();
}

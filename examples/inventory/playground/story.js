// The steps of the story. Each has a text and an action.

import { TTL_MS } from "./worker.js";

const pause = (ms) => new Promise((done) => setTimeout(done, ms));

/** The steps. `a` and `b` are the current workers. */
export const steps = [
  {
    text: "A acquires the lock. Its lease has a token. A reads the stock.",
    run: async ({ a }) => {
      await a.acquire();
      await pause(1_000);
    },
  },
  {
    text: "A is paused, for example by a garbage collection or because its machine is frozen. It does not renew its lease.",
    run: async ({ a }) => {
      a.pause();
      await pause(TTL_MS - 800);
    },
  },
  {
    text: "A’s lease expires. B acquires the lock, with a higher token, and reads the stock.",
    run: async ({ b }) => {
      await b.acquire();
      await pause(900);
    },
  },
  {
    text: "B sells one, and writes the new stock.",
    run: async ({ b }) => {
      await b.write();
      await pause(1_200);
    },
  },
  {
    text: "A wakes up. It still believes that it holds the lock, sells one, and writes a stock that it has computed from its old read.",
    run: async ({ a }) => {
      a.wake();
      await pause(500);
      await a.write();
      await pause(600);
    },
  },
];

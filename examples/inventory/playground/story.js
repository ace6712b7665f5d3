// The story, step by step: each one says what happens, and makes it happen.

import { TTL_MS } from "./worker.js";

const pause = (ms) => new Promise((done) => setTimeout(done, ms));

/** The steps; `a` and `b` are the workers of now, `before` is what the step waits for by itself. */
export const steps = [
  {
    text: "A takes the lock. Its lease comes with a token. It reads the stock.",
    run: async ({ a }) => {
      await a.acquire();
      await pause(1_000);
    },
  },
  {
    text: "A is paused: garbage collection, a frozen machine, a slow network. It renews nothing.",
    run: async ({ a }) => {
      a.pause();
      await pause(TTL_MS - 800);
    },
  },
  {
    text: "A’s lease runs out. B takes the lock, with a higher token, and reads the stock.",
    run: async ({ b }) => {
      await b.acquire();
      await pause(900);
    },
  },
  {
    text: "B sells one, and writes what is left.",
    run: async ({ b }) => {
      await b.write();
      await pause(1_200);
    },
  },
  {
    text: "A wakes up. It still believes that it holds the lock, sells one, and writes what it has worked out from what it read before.",
    run: async ({ a }) => {
      a.wake();
      await pause(500);
      await a.write();
      await pause(600);
    },
  },
];

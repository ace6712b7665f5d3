// Connects the parts of the page. The timeline and the log show the events of the workers.

import * as service from "./service.js";
import { steps } from "./story.js";
import { Timeline, short } from "./timeline.js";
import { Worker } from "./worker.js";

const FULL = 10;
const STOP_DELAY_MS = 1_500;

const at = (id) => document.getElementById(id);
const timeline = new Timeline();
const clock = new Intl.NumberFormat("en", { minimumFractionDigits: 1, maximumFractionDigits: 1 });

let workers = {};
let sku = null;
let isFenced = true;
let stock = FULL;
let sold = 0;
let refused = 0;
/** The next step, and whether a step is running. */
let step = 0;
let running = false;
/** The number of the run. Results of an earlier run are ignored. */
let run = 0;
let stopTimer = null;

// --- A new run, with a new SKU, full stock, and no leases.

async function startOver() {
  run += 1;
  const mine = run;
  step = 0;
  running = false;
  const before = Object.values(workers);
  const number = crypto.getRandomValues(new Uint32Array(1))[0].toString(36);
  sku = `playground-${number}`;
  workers = Object.fromEntries(
    ["A", "B"].map((name) => [
      name,
      new Worker(name, sku, { report: (...event) => mine === run && handle(name, ...event), isFenced: () => isFenced }),
    ]),
  );
  [stock, sold, refused] = [FULL, 0, 0];
  clearTimeout(stopTimer);
  timeline.clear();
  timeline.setFence(isFenced);
  at("log").replaceChildren();
  at("legend").textContent = "";
  show();
  await Promise.all(before.map((worker) => worker.stop()));
  await attempt(async () => {
    const lease = await service.acquire(sku, { ttl_ms: 5_000, owner: "stocktaking" });
    await service.write(sku, lease, FULL);
    await service.release(sku, lease);
    if (mine !== run) return;
    timeline.maxToken = lease.token;
    timeline.setStock(FULL);
    timeline.draw();
    verdict("right", isFenced ? "Play the story: it takes ten seconds." : "The fence is off. Play the story to see a wrong stock.");
  });
}

// --- Events of the workers.

function handle(name, event, details = {}) {
  const worker = workers[name];
  if (event !== "changed") {
    clearTimeout(stopTimer);
    timeline.go();
  }
  const handlers = {
    granted: () => {
      timeline.grant(name, details.token, details.ttl);
      // The grant is announced to the fence before it is returned.
      timeline.maxToken = details.token - 1;
      at("legend").textContent = `Tokens are shown without their epoch: ${short(details.token)} is ${details.token}. The SKU is ${sku}.`;
      log(name, `acquires the lock with token ${short(details.token)}.`);
    },
    read: () => {
      timeline.mark(name, "read", details);
      log(name, `reads ${details.stock}.`);
    },
    renewed: () => timeline.renew(name, details.ttl),
    lost: () => {
      timeline.end(name);
      log(name, "notices that it has lost its lease.", "bad");
    },
    paused: () => {
      const lease = timeline.leaseOf(name);
      if (lease && worker.lease) lease.believed = true;
      timeline.pause(name);
      log(name, worker.lease ? "is paused. Its lease is no longer renewed." : "is paused.");
    },
    woke: () => {
      timeline.wake(name);
      log(name, worker.lease ? "wakes up, and believes that it holds the lock." : "wakes up.");
    },
    written: () => {
      sold += 1;
      stock = details.stock;
      const wrong = stock !== FULL - sold;
      timeline.mark(name, details.fenced ? "written" : "unfenced", { ...details, wrong });
      if (details.fenced) timeline.maxToken = details.token;
      timeline.setStock(stock, wrong);
      log(name, wrong ? `overwrites the other worker\u2019s write with ${stock}. A sale is lost.` : `writes ${stock}.`, wrong ? "bad" : "good");
      checkStock();
    },
    refused: () => {
      refused += 1;
      timeline.mark(name, "refused", details);
      log(name, `is refused: 412 stale-token, presented ${short(details.token)}, highest stale token ${short(details.maxToken)}.`, "bad");
      checkStock();
    },
    released: () => endLease(name),
  };
  handlers[event]?.();
  show();
  stopTimelineSoon();
}

function endLease(name) {
  const lease = timeline.leaseOf(name);
  if (lease?.believed) lease.believedUntil = timeline.now();
  timeline.end(name);
}

/** Stops the timeline's clock shortly after the last event. */
function stopTimelineSoon() {
  const isActive = Object.values(workers).some((worker) => worker.lease || worker.busy || worker.paused);
  clearTimeout(stopTimer);
  if (!isActive && !running) stopTimer = setTimeout(() => timeline.stop(), STOP_DELAY_MS);
}

// --- Texts and figures.

function log(name, text, tone = "") {
  const item = document.createElement("li");
  if (tone) item.dataset.tone = tone;
  const time = document.createElement("span");
  time.className = "soft";
  time.textContent = `${clock.format(timeline.now() / 1_000)} s `;
  const who = document.createElement("strong");
  who.textContent = `${name} `;
  item.append(time, who, text);
  at("log").prepend(item);
  while (at("log").childElementCount > 100) at("log").lastElementChild.remove();
}

async function checkStock() {
  const mine = run;
  const actual = await service.read(sku).catch(() => stock);
  if (mine !== run) return;
  stock = actual;
  const expected = FULL - sold;
  if (stock !== expected) {
    const lost = stock - expected;
    verdict("wrong", `Wrong: ${lost === 1 ? "one sale was" : `${lost} sales were`} overwritten. Both workers received a success.`);
  } else if (refused > 0) {
    verdict("right", "Right: the fence refused the late write. Switch the fence off, and play the story again.");
  } else {
    verdict("right", "Right.");
  }
  show();
}

function verdict(kind, text) {
  at("verdict").dataset.verdict = kind;
  at("verdict-text").textContent = text;
}

function show() {
  at("stock").textContent = stock;
  at("sold").textContent = sold;
  at("expected").textContent = FULL - sold;
  at("fence").setAttribute("aria-checked", String(isFenced));
  at("fence-state").textContent = isFenced ? "on" : "off";
  at("play").disabled = running;
  at("step").disabled = running || step >= steps.length;
  for (const [place, item] of [...at("story").children].entries()) {
    item.classList.toggle("done", place < step);
    const isNow = place === (running ? step : step - 1);
    if (isNow) item.setAttribute("aria-current", "step");
    else item.removeAttribute("aria-current");
  }
  for (const name of ["A", "B"]) showWorker(name);
}

function showWorker(name) {
  const [worker, part] = [workers[name], cards[name]];
  const token = worker.lease ? `, token ${short(worker.lease.token)}` : "";
  const read = worker.hasRead === null ? "" : `. It has read ${worker.hasRead}`;
  part.state.textContent = `${worker.state}${token}${read}.`;
  // A disabled button would lose the focus, so the code sets `aria-disabled` instead.
  const can = (button, yes) => button.setAttribute("aria-disabled", String(!yes));
  can(part.acquire, !worker.lease && !worker.busy && !worker.paused && !running);
  can(part.write, Boolean(worker.lease) && worker.hasRead !== null && !worker.busy && !worker.paused && !running);
  can(part.pause, !running);
  part.pause.textContent = worker.paused ? "Wake up" : "Pause";
}

async function attempt(call) {
  try {
    at("failure").hidden = true;
    await call();
  } catch (error) {
    at("failure").textContent = error.message;
    at("failure").hidden = false;
  }
}

// --- Buttons.

function button(text, press) {
  const made = document.createElement("button");
  made.type = "button";
  made.textContent = text;
  made.addEventListener("click", () => {
    if (made.getAttribute("aria-disabled") !== "true") attempt(press);
  });
  return made;
}

const cards = Object.fromEntries(
  ["A", "B"].map((name) => {
    const card = document.createElement("fieldset");
    const title = document.createElement("legend");
    title.textContent = `Worker ${name}`;
    const state = document.createElement("p");
    const buttons = document.createElement("div");
    buttons.className = "buttons";
    const acquire = button("Acquire", () => workers[name].acquire());
    const pause = button("Pause", () => (workers[name].paused ? workers[name].wake() : workers[name].pause()));
    const write = button("Write", () => workers[name].write());
    buttons.append(acquire, pause, write);
    card.append(title, state, buttons);
    at("workers").append(card);
    return [name, { state, acquire, pause, write }];
  }),
);

at("story").append(
  ...steps.map(({ text }) => {
    const item = document.createElement("li");
    item.textContent = text;
    return item;
  }),
);

async function takeStep() {
  const mine = run;
  running = true;
  show();
  try {
    await steps[step].run({ a: workers.A, b: workers.B });
    if (mine === run) step += 1;
  } finally {
    if (mine === run) {
      running = false;
      show();
      stopTimelineSoon();
    }
  }
  return mine === run;
}

at("play").addEventListener("click", () =>
  attempt(async () => {
    if (step > 0 || sold > 0 || refused > 0 || timeline.began !== null) await startOver();
    while (step < steps.length && (await takeStep()));
  }),
);
at("step").addEventListener("click", () => attempt(takeStep));
at("again").addEventListener("click", startOver);
at("fence").addEventListener("click", () => {
  isFenced = !isFenced;
  timeline.setFence(isFenced);
  timeline.draw();
  if (timeline.began === null) {
    verdict("right", isFenced ? "Play the story: it takes ten seconds." : "The fence is off. Play the story to see a wrong stock.");
  }
  show();
});

startOver();

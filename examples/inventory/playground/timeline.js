// The timeline: one lane per worker, with its leases as bars, and one lane for the stock, with the
// fence above it.

const svg = "http://www.w3.org/2000/svg";
const LEFT = 84;
const RIGHT = 20;
const LANES = { A: 58, B: 138 };
const BAR = 26;
const FENCE = 206;
const STOCK = 252;
const HEIGHT = 292;
const WINDOW_MS = 9_000;
const MOST = 300;

const place = document.getElementById("timeline");

function draw(name, attributes, text) {
  const made = document.createElementNS(svg, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

/** Formats a token without the digits of its epoch. */
export const short = (token) => `#${token % 1_000_000_000 || token}`;

export class Timeline {
  constructor() {
    this.clear();
    this.motion = matchMedia("(prefers-reduced-motion: reduce)");
    addEventListener("resize", () => this.draw());
  }

  clear() {
    this.began = null;
    this.stoppedAt = null;
    this.leases = [];
    this.pauses = [];
    this.marks = [];
    this.stock = [];
    this.fence = [];
    this.maxToken = null;
  }

  // --- The clock, which stops between events.

  now() {
    if (this.began === null) return 0;
    return (this.stoppedAt ?? performance.now()) - this.began;
  }

  go() {
    const now = performance.now();
    if (this.began === null) this.began = now;
    if (this.stoppedAt !== null) {
      this.began += now - this.stoppedAt;
      this.stoppedAt = null;
    }
    if (this.frame) return;
    const next = () => {
      this.draw();
      this.frame = null;
      if (this.stoppedAt !== null || this.began === null) return;
      if (this.motion.matches) this.frame = setTimeout(next, 250);
      else this.frame = requestAnimationFrame(next);
    };
    this.frame = true;
    next();
  }

  stop() {
    if (this.began !== null && this.stoppedAt === null) this.stoppedAt = performance.now();
    this.draw();
  }

  // --- Events.

  grant(worker, token, ttl) {
    this.leases.push({ worker, token, from: this.now(), until: this.now() + ttl, renewals: [], ended: null });
    this.trim(this.leases);
  }

  leaseOf(worker) {
    return this.leases.findLast((lease) => lease.worker === worker && lease.ended === null);
  }

  renew(worker, ttl) {
    const lease = this.leaseOf(worker);
    if (!lease) return;
    lease.renewals.push(this.now());
    lease.until = this.now() + ttl;
  }

  end(worker) {
    const lease = this.leaseOf(worker);
    if (lease) lease.ended = Math.min(this.now(), lease.until);
  }

  pause(worker) {
    this.pauses.push({ worker, from: this.now(), to: null });
    this.trim(this.pauses);
  }

  wake(worker) {
    const pause = this.pauses.findLast((one) => one.worker === worker && one.to === null);
    if (pause) pause.to = this.now();
  }

  /** `kind` is `read`, `written`, `unfenced` or `refused`. */
  mark(worker, kind, details) {
    this.marks.push({ worker, kind, at: this.now(), ...details });
    this.trim(this.marks);
  }

  setStock(value, wrong = false) {
    this.stock.push({ at: this.now(), value, wrong });
    this.trim(this.stock);
  }

  setFence(on) {
    this.fence.push({ at: this.now(), on });
    this.trim(this.fence);
  }

  trim(list) {
    if (list.length > MOST) list.shift();
  }

  // --- Drawing.

  draw() {
    const width = Math.max(place.clientWidth, 320);
    const now = this.now();
    // Shows the whole timeline if it fits, and otherwise its last part.
    const length = now < WINDOW_MS - 1_500 ? WINDOW_MS : Math.min(now + 1_500, 2 * WINDOW_MS);
    const from = Math.max(now + 1_500 - length, 0);
    const inner = width - LEFT - RIGHT;
    const x = (time) => LEFT + (Math.max(time - from, -500) / length) * inner;
    this.isNarrow = width < 600;
    const isSeen = (time) => time >= from - 100;
    const parts = [];
    const add = (...one) => parts.push(draw(...one));

    const every = width < 600 ? 4 : 2;
    for (let second = Math.ceil(from / 1_000); second * 1_000 <= from + length; second += 1) {
      if (second % every !== 0) continue;
      add("line", { class: "grid", x1: x(second * 1_000), x2: x(second * 1_000), y1: 14, y2: STOCK + 18 });
      if (x(second * 1_000) < width - 40) add("text", { class: "axis", x: x(second * 1_000) + 4, y: HEIGHT - 6 }, `${second} s`);
    }
    for (const [worker, y] of Object.entries(LANES)) {
      add("line", { class: "lane", x1: LEFT, x2: width - RIGHT, y1: y, y2: y });
      add("text", { class: "lane-name", x: 4, y: y + 5 }, this.isNarrow ? worker : `Worker ${worker}`);
    }
    add("text", { class: "lane-name", x: 4, y: STOCK + 5 }, "Stock");
    this.drawFence(add, x, now, width);
    for (const lease of this.leases) this.drawLease(add, x, now, lease);
    for (const pause of this.pauses) {
      const y = LANES[pause.worker] + BAR / 2 + 4;
      const [start, stop] = [x(pause.from), x(pause.to ?? now)];
      add("rect", { class: "paused", x: start, y, width: Math.max(stop - start, 2), height: 6, rx: 3 });
      if (stop - start > 44) add("text", { class: "small", x: start, y: y + 19 }, "paused");
    }
    for (const mark of this.marks) if (isSeen(mark.at)) this.drawMark(add, x, mark);
    this.drawStock(add, x, from);
    if (this.began !== null) add("line", { class: "now", x1: x(now), x2: x(now), y1: 14, y2: STOCK + 18 });

    place.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    place.replaceChildren(...parts);
  }

  drawFence(add, x, now, width) {
    for (const [at, part] of this.fence.entries()) {
      const end = this.fence[at + 1]?.at;
      const attributes = { x1: x(at === 0 ? 0 : part.at), x2: end === undefined ? width - RIGHT : x(end), y1: FENCE, y2: FENCE };
      add("line", { class: part.on ? "fence" : "fence off", ...attributes });
    }
    const on = this.fence.at(-1)?.on;
    add("text", { class: "lane-name", x: 4, y: FENCE + 5 }, on ? "Fence" : "No fence");
    if (on && this.maxToken !== null) {
      const text = { class: "small max-token", x: width - RIGHT, y: FENCE - 7, "text-anchor": "end" };
      add("text", text, `highest stale token ${short(this.maxToken)}`);
    }
  }

  drawLease(add, x, now, lease) {
    const y = LANES[lease.worker] - BAR / 2;
    const end = lease.ended ?? lease.until;
    const [start, stop] = [x(lease.from), x(end)];
    const held = x(Math.min(now, end));
    const tone = lease.worker === "A" ? "a" : "b";
    add("rect", { class: `lease rest ${tone}`, x: start, y, width: Math.max(stop - start, 2), height: BAR, rx: 5 });
    add("rect", { class: `lease ${tone}`, x: start, y, width: Math.max(held - start, 2), height: BAR, rx: 5 });
    for (const at of lease.renewals) add("circle", { class: "renewal", cx: x(at), cy: y + BAR - 6, r: 1.8 });
    add("text", { class: "token", x: start + 8, y: y + 17 }, short(lease.token));
    // The lease has expired while its worker was paused, and the worker has not noticed that.
    const until = lease.believedUntil ?? (lease.believed ? now : null);
    if (until !== null && until > end) {
      add("rect", { class: `lease believed ${tone}`, x: stop, y, width: Math.max(x(until) - stop, 0), height: BAR, rx: 5 });
      if (x(until) - stop > 108) add("text", { class: "small", x: stop + 8, y: y + 17 }, "believes it holds");
    }
  }

  drawMark(add, x, mark) {
    const at = x(mark.at);
    const y = LANES[mark.worker];
    if (mark.kind === "read") {
      add("line", { class: "read", x1: at, x2: at, y1: STOCK, y2: y + BAR / 2 });
      add("circle", { class: "read-dot", cx: at, cy: y + BAR / 2, r: 3.5 });
      add("text", { class: "small", x: at + 6, y: FENCE + 22 }, this.isNarrow ? String(mark.stock) : `reads ${mark.stock}`);
      return;
    }
    if (mark.kind === "refused") {
      const d = `M${at},${y} L${at + 8},${FENCE - 3} L${at + 26},${FENCE - 30}`;
      add("path", { class: "write bounced", d });
      add("circle", { class: "impact", cx: at + 8, cy: FENCE, r: 6 });
      add("text", { class: "refusal", x: at + 32, y: FENCE - 26 }, this.isNarrow ? "412" : `${short(mark.token)} refused: 412`);
      return;
    }
    add("line", { class: `write ${mark.kind}`, x1: at, x2: at, y1: y, y2: STOCK - 16 });
    add("path", { class: `arrow ${mark.kind}`, d: `M${at - 5},${STOCK - 20}h10l-5,8z` });
    const text = this.isNarrow ? "" : mark.wrong ? `${short(mark.token)} overwrites: ${mark.stock}` : `writes ${mark.stock}`;
    add("text", { class: mark.wrong ? "refusal" : "small", x: at + 8, y: FENCE - 10 }, text);
  }

  drawStock(add, x, from) {
    const now = this.now();
    for (const [at, part] of this.stock.entries()) {
      const end = this.stock[at + 1]?.at ?? Math.max(now, part.at);
      if (end < from && at + 1 < this.stock.length) continue;
      const start = Math.max(x(part.at), LEFT);
      const attributes = { x: start, y: STOCK - 12, width: Math.max(x(end) - start, 3), height: 24, rx: 5 };
      add("rect", { class: part.wrong ? "stock wrong" : "stock", ...attributes });
      add("text", { class: part.wrong ? "value wrong" : "value", x: start + 8, y: STOCK + 5 }, String(part.value));
    }
  }
}

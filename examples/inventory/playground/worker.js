// A worker acquires the lock, reads the stock, and writes it back reduced by one. While it is
// paused, it does not renew its lease and does not notice that the lease is lost.

import * as service from "./service.js";

export const TTL_MS = 2_000;
const RENEW_EVERY_MS = 600;
const WAIT_MS = 15_000;

export class Worker {
  /** `report(event, details)` receives all events. `isFenced()` returns whether writes use the fence. */
  constructor(name, sku, { report, isFenced }) {
    Object.assign(this, { name, sku, report, isFenced });
    this.lease = null;
    this.hasRead = null;
    this.paused = false;
    this.busy = false;
    this.stopped = false;
    this.timer = null;
  }

  get state() {
    if (this.busy === "waiting") return "waits in the queue";
    if (!this.lease) return this.paused ? "is paused" : "has no lease";
    if (this.paused) return "is paused, and believes that it holds the lease";
    return "holds the lease";
  }

  async acquire() {
    if (this.lease || this.busy) return;
    this.busy = "waiting";
    this.report("changed");
    try {
      const sent = performance.now();
      const body = { ttl_ms: TTL_MS, wait_ms: WAIT_MS, owner: `worker ${this.name}` };
      const lease = await service.acquire(this.sku, body);
      if (this.stopped) {
        await this.releaseIfHeld(lease);
        return;
      }
      this.lease = lease;
      this.report("granted", { token: lease.token, ttl: TTL_MS, waited: performance.now() - sent });
      this.hasRead = await service.read(this.sku);
      this.report("read", { stock: this.hasRead });
      this.renewLater();
    } catch (error) {
      if (!this.stopped) throw error;
    } finally {
      this.busy = false;
      this.report("changed");
    }
  }

  renewLater() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.renew(), RENEW_EVERY_MS);
  }

  async renew() {
    const lease = this.lease;
    if (!lease || this.paused || this.busy) return;
    try {
      await service.renew(this.sku, lease, { ttl_ms: TTL_MS });
      if (this.lease !== lease) return;
      this.report("renewed", { ttl: TTL_MS });
      if (!this.paused) this.renewLater();
    } catch (error) {
      if (this.lease !== lease || this.paused) return;
      this.lease = null;
      this.report("lost", { error });
      this.report("changed");
    }
  }

  pause() {
    if (this.paused) return;
    this.paused = true;
    clearTimeout(this.timer);
    this.report("paused");
    this.report("changed");
  }

  /** Resumes the worker in the state in which it was paused. */
  wake() {
    if (!this.paused) return;
    this.paused = false;
    this.report("woke");
    if (this.lease) this.renewLater();
    this.report("changed");
  }

  /** Writes a stock computed from the last read, without another read. */
  async write() {
    const { lease } = this;
    if (!lease || this.paused || this.busy || this.hasRead === null) return;
    this.busy = "writing";
    clearTimeout(this.timer);
    this.report("changed");
    const stock = Math.max(this.hasRead - 1, 0);
    const fenced = this.isFenced();
    try {
      if (fenced) await service.write(this.sku, lease, stock);
      else await service.writeUnfenced(this.sku, stock);
      this.report("written", { stock, token: lease.token, fenced });
    } catch (error) {
      if (error.status !== 412) throw error;
      this.report("refused", { stock, token: lease.token, maxToken: error.problem.max_token });
    } finally {
      this.lease = null;
      this.hasRead = null;
      this.busy = false;
      await this.releaseIfHeld(lease);
      this.report("changed");
    }
  }

  /** Releases the lease, if this worker still holds it. */
  async releaseIfHeld(lease) {
    try {
      const { held, token } = await service.inspect(this.sku);
      if (held && token === lease.token) await service.release(this.sku, lease);
    } catch {
      // Without a release, the lease expires.
    }
    this.report("released");
  }

  /** Stops the worker and releases its lease. If it waits for a lease, it releases the lease later. */
  async stop() {
    this.stopped = true;
    clearTimeout(this.timer);
    const { lease } = this;
    this.lease = null;
    this.report = () => {};
    if (lease) await this.releaseIfHeld(lease);
  }
}

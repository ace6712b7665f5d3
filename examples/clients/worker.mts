// A worker that decrements the stock of a SKU under a lease, with Node's standard library.
//
//     node worker.mts sku-1
//
// It needs Node 22.18 or later, or Node 20.3 or later with tsx. The README lists the environment
// variables.

import { randomUUID } from "node:crypto";
import { setTimeout as sleep } from "node:timers/promises";

const { env } = process;
const locks = `${env.TOWER_FENCE_URL ?? "http://127.0.0.1:4120"}/locks/`;
const service = `${env.SERVICE_URL ?? "http://127.0.0.1:8000"}/inventory/`;
const ttl_ms = Number(env.TTL_MS ?? 30_000);
const work_ms = Number(env.WORK_MS ?? 5_000);
const wait_ms = 10_000;

/** The lease has expired or was broken, and another holder may have it. */
class LeaseLost extends Error {}

/** A response with a status of 300 or above. */
class Refusal extends Error {
  status: number;
  constructor(status: number, body: string) {
    super(`refused with ${status}: ${body}`);
    this.status = status;
  }
}

/** Whether a retry may succeed: the server is unavailable, or did not respond. */
const mayPass = (error: unknown) => !(error instanceof Refusal) || error.status >= 500;

type Headers = Record<string, string>;

/**
 * Returns the JSON of the response. Throws a Refusal, or another error without a response. The
 * timeout is independent of `signal`, so the worker does not keep the lease while a service does
 * not respond.
 */
async function call(
  method: string, url: string, headers: Headers, body?: object, signal?: AbortSignal,
) {
  const timeout = AbortSignal.timeout(wait_ms + 5_000);
  const response = await fetch(url, {
    method,
    headers: { "Content-Type": "application/json", ...headers },
    body: body && JSON.stringify(body),
    redirect: "manual", // otherwise a GET would be sent, even to another server
    signal: signal ? AbortSignal.any([signal, timeout]) : timeout,
  });
  const text = await response.text();
  if (!response.ok) throw new Refusal(response.status, text);
  return text ? JSON.parse(text) : undefined;
}

/**
 * Acquires the lease, and returns its Fencing-Token. A retry under the same lease id finds the
 * lease that an earlier request was granted.
 */
async function acquire(url: string, headers: Headers): Promise<string> {
  const body = { ttl_ms, wait_ms, owner: "worker.mts", lease_id: headers["Lease-Id"] };
  for (let retriesLeft = 2; ; retriesLeft--) {
    try {
      return (await call("POST", url, headers, body)).fencing_token;
    } catch (error) {
      if (retriesLeft === 0 || !mayPass(error)) throw error;
    }
    await sleep(1_000);
  }
}

/** Renews the lease, and returns its expiry, measured from before the request. */
async function renew(url: string, headers: Headers, timeout_ms: number): Promise<number> {
  const sent = performance.now();
  const timeout = AbortSignal.timeout(Math.max(0, Math.floor(timeout_ms)));
  const renewed = await call("PUT", url, headers, { ttl_ms }, timeout);
  if (!renewed?.fencing_token) throw new Error("the response to the renewal comes from a proxy");
  return sent + ttl_ms;
}

/**
 * Renews the lease at each third of its TTL. If the server does not respond, retries. If a renewal
 * is refused, or the lease expires, aborts `held`.
 */
async function keep(url: string, headers: Headers, end: number, held: AbortController) {
  const { signal } = held;
  const left = () => end - performance.now();
  let pause = ttl_ms / 3;
  while (true) {
    await sleep(Math.max(0, Math.min(pause, left())), undefined, { signal }).catch(() => {});
    if (signal.aborted) return;
    try {
      end = await renew(url, headers, Math.min(ttl_ms / 3, left()));
      pause = ttl_ms / 3;
    } catch (error) {
      pause = ttl_ms / 10;
      if (!mayPass(error) || left() <= 0) held.abort(new LeaseLost("the lease is lost: stopped"));
    }
  }
}

/**
 * Calls `work` with the Fencing-Token of a lease. If the lease is lost, aborts the signal of
 * `work`, and throws LeaseLost.
 */
async function withLease(
  resource: string, work: (token: string, signal: AbortSignal) => Promise<void>,
) {
  const url = locks + encodeURIComponent(resource);
  const headers = {
    Authorization: `Bearer ${env.TOWER_FENCE_SECRET ?? ""}`,
    "Lease-Id": randomUUID(), // a new one for each acquisition
  };
  const held = new AbortController();
  try {
    const token = await acquire(url, headers);
    // The acquisition may have waited for longer than the TTL. A renewal returns the expiry.
    const end = await renew(url, headers, ttl_ms / 3);
    keep(url, headers, end, held);
    await work(token, held.signal).finally(() => held.signal.throwIfAborted());
  } finally {
    held.abort();
    // If the release fails, the lease is lost, or expires by itself.
    await call("DELETE", url, headers).catch(() => {});
  }
}

async function decrement(sku: string, token: string, signal: AbortSignal) {
  const url = service + encodeURIComponent(sku);
  const { stock } = await call("GET", url, {}, undefined, signal);
  console.log(`the stock is ${stock}, read under the token ${token}`);
  await sleep(work_ms, undefined, { signal }); // the work
  await call("PUT", url, { "Fencing-Token": token }, { stock: stock - 1 }, signal);
  console.log(`the stock is ${stock - 1} now`);
}

const sku = process.argv[2] ?? "sku-1";
try {
  await withLease(sku, (token, signal) => decrement(sku, token, signal));
} catch (error) {
  if (!(error instanceof LeaseLost || error instanceof Refusal)) throw error;
  console.error(error.message);
  process.exitCode = 1;
}

// Requests to the service for locks and stock, and writes that bypass the fence.

/** An error response. */
export class Refused extends Error {
  constructor(status, problem) {
    super(problem.detail ?? problem.title ?? `The service responded with status ${status}.`);
    this.status = status;
    this.problem = problem;
  }
}

const root = new URL("../", import.meta.url);

async function request(method, path, body, headers = {}) {
  let response;
  try {
    response = await fetch(new URL(path, root), {
      method,
      headers: { "Content-Type": "application/json", ...headers },
      body: body === undefined ? undefined : JSON.stringify(body),
      cache: "no-store",
      signal: AbortSignal.timeout(20_000),
    });
  } catch {
    throw new Refused(0, { detail: "The service does not respond." });
  }
  const text = await response.text();
  let parsed = {};
  try {
    parsed = JSON.parse(text);
  } catch {
    // The response has no body, or its body is not JSON.
  }
  if (!response.ok) throw new Refused(response.status, parsed);
  return parsed;
}

const lock = (sku) => `locks/${encodeURIComponent(sku)}`;
const stock = (sku) => `inventory/${encodeURIComponent(sku)}`;

export const acquire = (sku, body) => request("POST", lock(sku), body);
export const renew = (sku, lease, body) => request("PUT", lock(sku), body, { "Lease-Id": lease.lease_id });
export const release = (sku, lease) => request("DELETE", lock(sku), undefined, { "Lease-Id": lease.lease_id });
export const inspect = (sku) => request("GET", lock(sku));
export const read = async (sku) => (await request("GET", stock(sku))).stock;
export const write = (sku, lease, number) =>
  request("PUT", stock(sku), { stock: number }, { "Fencing-Token": lease.fencing_token });
export const writeUnfenced = (sku, number) =>
  request("PUT", `playground/unfenced/${encodeURIComponent(sku)}`, { stock: number });

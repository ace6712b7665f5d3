// Requests to the service for locks and stock, and writes that bypass the fence.

/** An error response. */
export class Refused extends Error {
  constructor(status, problem) {
    super(problem.detail ?? problem.title ?? `The service answered with status ${status}.`);
    this.status = status;
    this.problem = problem;
  }
}

const root = new URL("../", import.meta.url);

async function ask(method, path, body, headers = {}) {
  let answer;
  try {
    answer = await fetch(new URL(path, root), {
      method,
      headers: { "Content-Type": "application/json", ...headers },
      body: body === undefined ? undefined : JSON.stringify(body),
      cache: "no-store",
      signal: AbortSignal.timeout(20_000),
    });
  } catch {
    throw new Refused(0, { detail: "The service does not answer." });
  }
  const text = await answer.text();
  let said = {};
  try {
    said = JSON.parse(text);
  } catch {
    // The response has no body, or its body is not JSON.
  }
  if (!answer.ok) throw new Refused(answer.status, said);
  return said;
}

const lock = (sku) => `locks/${encodeURIComponent(sku)}`;
const stock = (sku) => `inventory/${encodeURIComponent(sku)}`;

export const acquire = (sku, body) => ask("POST", lock(sku), body);
export const renew = (sku, lease, body) => ask("PUT", lock(sku), body, { "Lease-Id": lease.lease_id });
export const release = (sku, lease) => ask("DELETE", lock(sku), undefined, { "Lease-Id": lease.lease_id });
export const inspect = (sku) => ask("GET", lock(sku));
export const read = async (sku) => (await ask("GET", stock(sku))).stock;
export const write = (sku, lease, number) =>
  ask("PUT", stock(sku), { stock: number }, { "Fencing-Token": lease.fencing_token });
export const writeUnfenced = (sku, number) =>
  ask("PUT", `playground/unfenced/${encodeURIComponent(sku)}`, { stock: number });

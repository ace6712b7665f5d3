// The requests to the process. All URLs are relative to this file.

const base = new URL("api/", import.meta.url);

export function url(path, query = {}) {
  const to = new URL(path, base);
  for (const [name, value] of Object.entries(query)) {
    if (value !== null && value !== undefined && value !== "") to.searchParams.set(name, value);
  }
  return to;
}

/** A failed request, with a message for the user, and the invalid field if the process names it. */
export class Refused extends Error {
  constructor(message, field) {
    super(message);
    this.field = field;
  }
}

async function ask(to, init) {
  let answer, text;
  const isChange = init.method === "POST";
  try {
    answer = await fetch(to, { ...init, cache: "no-store", signal: AbortSignal.timeout(15_000) });
    text = await answer.text();
  } catch {
    throw new Refused(`The process does not respond.${isChange ? " It may still execute the request." : ""}`);
  }
  if (answer.status === 204) return null;
  const body = parsed(text);
  if (answer.ok && body !== null) return body;
  const error = refused(answer.status, body);
  if (isChange && String(body?.type).endsWith("#store-unavailable")) {
    error.message += ". The change may have been made nevertheless.";
  }
  throw error;
}

function refused(status, body) {
  if (status === 401) return new Refused("You are no longer signed in. Reload the page.");
  const texts = [body?.detail, body?.title, `The response has status ${status} and an invalid body.`];
  const said = texts.find((one) => typeof one === "string");
  return new Refused(said.charAt(0).toUpperCase() + said.slice(1), body?.field);
}

/** Returns why the process refuses a stream, or null if the process does not refuse or respond. */
export async function refusal(path) {
  try {
    const answer = await fetch(url(path), { cache: "no-store", signal: AbortSignal.timeout(5_000) });
    if (!answer.ok) return refused(answer.status, parsed(await answer.text())).message;
    await answer.body.cancel();
  } catch {
    // The process does not respond.
  }
  return null;
}

/** Parses JSON. Returns null if the text is not JSON. */
function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}

export const get = (path, query) => ask(url(path, query), {});

export const post = (path, body) =>
  ask(url(path), {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
  });

/** Looks up the fence of a resource, and its lease, which is null if it is not held. */
export async function inspect(resource) {
  const found = await get("fence", { resource });
  // During an upgrade, the response may come from a process of another version, with other members.
  if (found.held_lease === undefined) {
    throw new Refused("The process and this page have different versions. Reload the page.");
  }
  return found;
}

// The requests to the process. All URLs are relative to this file.

const base = new URL("api/", import.meta.url);

export function url(path, query = {}) {
  const to = new URL(path, base);
  for (const [name, value] of Object.entries(query)) {
    if (value !== null && value !== undefined && value !== "") to.searchParams.set(name, value);
  }
  return to;
}

/** A failed request, with a message for the user. */
export class Refused extends Error {}

async function ask(to, init) {
  let answer;
  try {
    answer = await fetch(to, { ...init, cache: "no-store", signal: AbortSignal.timeout(15_000) });
  } catch {
    throw new Refused("The process does not respond.");
  }
  if (answer.ok) return answer.status === 204 ? null : answer.json();
  if (answer.status === 401) throw new Refused("You are no longer signed in. Reload the page.");
  const problem = await answer.json().catch(() => ({}));
  const said = problem.detail ?? problem.title ?? `The process responded with status ${answer.status}.`;
  throw new Refused(said.charAt(0).toUpperCase() + said.slice(1));
}

export const get = (path, query) => ask(url(path, query), {});

export const post = (path, body) =>
  ask(url(path), {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
  });

// What asks first, and what tells more: dialogs, which give the focus back to where it was.

import { get, post } from "./api.js";
import { element, holder, name, notice, owner, time, token } from "./words.js";

const at = (id) => document.getElementById(id);

let known = null;
/** How often something was looked up: an answer that comes late is about something else. */
let asked = 0;
/** Called when something was changed. */
let changed = () => {};

export function onChange(call) {
  changed = call;
}

// --- Look up a resource: both sides of it.

export async function lookUp(resource) {
  known = null;
  asked += 1;
  const mine = asked;
  at("look-up-title").replaceChildren(name(resource));
  at("look-up-facts").replaceChildren();
  notice(at("look-up-error"), null);
  at("look-up-break").hidden = true;
  at("look-up-reset").hidden = true;
  if (!at("look-up").open) at("look-up").showModal();
  try {
    const found = await get("fence", { resource });
    if (mine !== asked) return;
    known = found;
    describe(found);
  } catch (error) {
    if (mine === asked) notice(at("look-up-error"), error);
  }
}

function describe(found) {
  const { row, lease } = found;
  const dead = row
    ? token(row.max_token)
    : found.floor > 0
      ? [token(found.floor), " by the floor of its partition: it has no row"]
      : "nothing: the resource was never named with a token";
  const facts = [
    ["Lease", lease.held ? holder(found) : "Nobody holds it."],
    lease.held && ["Time left", `${time(lease.ttl_ms)}, unless it is renewed`],
    lease.held && ["In line", lease.waiters === 0 ? "nobody" : String(lease.waiters)],
    ["Dead up to", dead],
    ["Granted", row?.announced ? token(row.announced) : "no grant was announced here"],
    ["Last used", row ? `${time(row.idle_ms)} ago, by a write, a fenced read or a grant that was announced` : "never"],
    ["Partition", [String(found.partition), found.floor > 0 ? ", floor " : ", no floor", found.floor > 0 ? token(found.floor) : ""]],
  ];
  const items = facts.filter(Boolean).flatMap(([term, said]) => [
    element("dt", {}, term),
    element("dd", {}, ...(Array.isArray(said) ? said : [said])),
  ]);
  at("look-up-facts").replaceChildren(...items);
  at("look-up-break").hidden = !lease.held;
  at("look-up-reset").hidden = found.max_token === 0;
}

at("look-up-close").addEventListener("click", () => at("look-up").close());
at("look-up-break").addEventListener("click", () => {
  breakLease({ resource: known.resource, ...known.lease });
});
at("look-up-reset").addEventListener("click", () => reset(known));

// --- Break a lease.

let toBreak = null;

export function breakLease(lease) {
  toBreak = lease;
  at("break-text").replaceChildren(
    element(
      "p",
      {},
      owner(lease.owner), " holds ", name(lease.resource), " with token ", token(lease.token), ".",
    ),
    element(
      "p",
      {},
      "It loses the lease at once, and hears of it when it renews next. The next grant outranks it. What it writes until then still counts, unless grants are announced to the fence.",
    ),
  );
  notice(at("break-error"), null);
  at("break").showModal();
}

at("break-no").addEventListener("click", () => at("break").close());
at("break-yes").addEventListener("click", () =>
  act(at("break-yes"), at("break-error"), async () => {
    await post("break", { resource: toBreak.resource, token: toBreak.token });
    at("break").close();
  }),
);

// --- Reset a fence.

let toReset = null;

function reset(found) {
  const { resource, lease } = found;
  toReset = resource;
  at("reset-text").replaceChildren(
    element("p", {}, "All tokens for ", name(resource), " up to this one are dead then, and all higher ones count again. Now they are dead up to ", token(found.max_token), "."),
    element(
      "p",
      { class: lease.held ? "notice" : "soft" },
      ...(lease.held
        ? [owner(lease.owner), " holds it, with ", token(lease.token), ": break that lease first, and wait for its requests to end."]
        : ["Nobody holds it. "]),
      found.granted > 0 ? " For all that the database knows, issuers have granted at least " : "",
      found.granted > 0 ? token(found.granted) : "",
      found.granted > 0 ? ": it does not go below." : "",
    ),
  );
  // What is known of grants where they are announced. Elsewhere only the issuer knows, and a number that is too low would
  // bring the dead back.
  const announced = found.row?.announced ?? 0;
  const highest = lease.held ? Math.max(announced, lease.token) : announced;
  at("reset-token").value = announced > 0 && announced < 999_999_999_999_999 ? String(highest) : "";
  at("reset-condition").checked = false;
  notice(at("reset-error"), null);
  at("reset").showModal();
}

at("reset-no").addEventListener("click", () => at("reset").close());
at("reset-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const number = Number(at("reset-token").value);
  act(at("reset-yes"), at("reset-error"), async () => {
    await post("reset", { resource: toReset, token: number });
    at("reset").close();
  });
});

// --- All of them.

/** Does it once, however often it is asked to; says so where it fails. */
async function act(button, failed, call) {
  if (button.disabled) return;
  button.disabled = true;
  notice(failed, null);
  try {
    await call();
    if (at("look-up").open && known) lookUp(known.resource);
    changed();
  } catch (error) {
    notice(failed, error);
  } finally {
    button.disabled = false;
  }
}

// The dialogs: the details of a resource, and the confirmations before a lease is broken or a fence
// is reset. When a dialog closes, the browser returns the focus to the element that had it before.

import { inspect, post } from "./api.js";
import { element, holder, moment, name, notice, owner, time, token } from "./words.js";

const at = (id) => document.getElementById(id);

let known = null;
/** The number of lookups. The response to an earlier lookup is ignored. */
let asked = 0;
/** Called after a lease was broken or a fence was reset. */
let changed = () => {};

export function onChange(call) {
  changed = call;
}

// --- Look up a resource: its lease and its fence.

/** Shows the lease and the fence of a resource. Returns them, unless another lookup followed. */
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
  // A hidden button would lose the focus.
  else at("look-up-close").focus();
  try {
    const found = await inspect(resource);
    if (mine !== asked) return;
    known = found;
    describe(found);
    return found;
  } catch (error) {
    if (mine === asked) notice(at("look-up-error"), error);
  }
}

function describe(found) {
  const { row, held_lease: lease } = found;
  const highest = row
    ? token(row.max_token)
    : found.floor > 0
      ? [token(found.floor), " (the floor of its partition; the resource has no row)"]
      : "none: no request has used a token for this resource";
  const facts = [
    ["Lease", lease ? holder(found) : "Not held"],
    lease && ["Time left", `${time(lease.ttl_ms)}, unless it is renewed`],
    lease && ["Waiters", lease.waiters === 0 ? "none" : String(lease.waiters)],
    ["Highest stale token", highest],
    row && ["Last announced grant", row.announced ? token(row.announced) : "none"],
    row && ["Last used", `${time(row.idle_ms)} ago, by a write, a fenced read, a raise, or an announced grant`],
    ["Read at", moment(found.now_ms)],
    ["Partition", [String(found.partition), found.floor > 0 ? ", floor " : ", no floor", found.floor > 0 ? token(found.floor) : ""]],
  ];
  const items = facts.filter(Boolean).flatMap(([term, said]) => [
    element("dt", {}, term),
    element("dd", {}, ...(Array.isArray(said) ? said : [said])),
  ]);
  at("look-up-facts").replaceChildren(...items);
  at("look-up-break").hidden = !lease;
  at("look-up-reset").hidden = found.max_token === 0;
}

at("look-up-close").addEventListener("click", () => at("look-up").close());
at("look-up-break").addEventListener("click", () => {
  breakLease({ resource: known.resource, ...known.held_lease });
});
at("look-up-reset").addEventListener("click", async () => {
  // The lease may have been granted since the lookup.
  const found = await lookUp(known.resource);
  if (found && at("look-up").open) reset(found);
});

// --- Break a lease.

export function breakLease(lease) {
  at("break-text").replaceChildren(
    element(
      "p",
      {},
      owner(lease.owner), " holds ", name(lease.resource), " with token ", token(lease.token), ".",
    ),
    element(
      "p",
      {},
      "The holder loses the lease immediately, and detects this at its next renewal. The next grant has a higher token. The holder's writes are still admitted until the fence has received that token: at the grant if grants are announced to the fence, otherwise at the first write of the new holder.",
    ),
  );
  open("break", { resource: lease.resource, token: lease.token });
}

at("break-no").addEventListener("click", () => at("break").close());
at("break-yes").addEventListener("click", (event) => {
  // The second click of a double click on "Break…" can land on this button.
  if (event.detail < 2) act("break");
});

// --- Reset a fence.

function reset(found) {
  const { resource, held_lease: lease } = found;
  at("reset-text").replaceChildren(
    element("p", {}, "After the reset, tokens for ", name(resource), " up to the one below are stale, and all higher tokens are admitted again. The highest stale token is now ", token(found.max_token), "."),
    element(
      "p",
      { class: lease ? "notice" : "soft" },
      ...(lease
        ? [owner(lease.owner), " holds the lease, with token ", token(lease.token), ". Break the lease first, and wait for its requests to end."]
        : ["The lease is not held."]),
      found.granted > 0 ? " Issuers have granted at least " : "",
      found.granted > 0 ? token(found.granted) : "",
      found.granted > 0 ? " (as recorded in the database): the fence cannot be reset to a lower token." : "",
    ),
  );
  // The default is known only if grants are announced to this fence. Otherwise only the issuer
  // knows the highest granted token, and a number that is too low would make stale tokens valid
  // again.
  const announced = found.row?.announced ?? 0;
  const highest = lease ? Math.max(announced, lease.token) : announced;
  at("reset-token").value = announced > 0 && announced < 999_999_999_999_999 ? String(highest) : "";
  at("reset-condition").checked = false;
  open("reset", { resource });
}

at("reset-no").addEventListener("click", () => at("reset").close());
at("reset-form").addEventListener("submit", (event) => {
  event.preventDefault();
  subject.token = Number(at("reset-token").value);
  act("reset");
});

// --- Shared by the confirmations. Each is named after its request.

/** The body of the request that the last opened dialog confirms. */
let subject = null;

function open(name, body) {
  subject = body;
  notice(at(`${name}-error`), null);
  at(`${name}-yes`).ariaDisabled = "false";
  at(name).showModal();
}

/** Sends the request once, even after several clicks. A late answer changes no other dialog. */
async function act(name) {
  const [mine, button, failed] = [subject, at(`${name}-yes`), at(`${name}-error`)];
  if (button.ariaDisabled === "true") return;
  // A disabled button would lose the focus.
  button.ariaDisabled = "true";
  notice(failed, null);
  try {
    await post(name, mine);
    if (mine === subject) at(name).close();
    if (at("look-up").open && known?.resource === mine.resource) lookUp(mine.resource);
    changed();
  } catch (error) {
    if (mine === subject) {
      notice(failed, error);
      if (!at(name).open) at(name).showModal();
    }
  } finally {
    if (mine === subject) button.ariaDisabled = "false";
  }
}

// The functions of the schema tower_fence, called with Prisma 7.

import { PrismaPg } from "@prisma/adapter-pg";
import { Prisma, PrismaClient } from "./generated/client.js";

// acquire() may wait for a write in progress.
const adapter = new PrismaPg({ connectionString: process.env.DATABASE_URL, lock_timeout: 5_000 });
const prisma = new PrismaClient({ adapter });

/** Admits the token and writes, in one transaction, which any error rolls back. */
async function setStock(sku: string, token: bigint, stock: number) {
  return prisma.$transaction(async (tx) => {
    await tx.$executeRaw`SET LOCAL lock_timeout = '5s'`;
    await tx.$executeRaw`SET LOCAL idle_in_transaction_session_timeout = '15s'`;
    await tx.$executeRaw`SET LOCAL client_connection_check_interval = '1s'`;
    const admitted = await tx.$queryRaw<Row[]>`SELECT tower_fence.admit(${sku}, ${token})`;
    await tx.inventory.update({ where: { sku }, data: { stock } });
    return admitted;
  });
}

/** Returns the DETAIL of a refusal with this SQLSTATE, and rethrows any other error. */
function refusal(error: unknown, sqlState: string) {
  if (error instanceof Prisma.PrismaClientKnownRequestError) {
    const cause = (error.meta?.driverAdapterError as any)?.cause;
    if (cause?.originalCode === sqlState) return JSON.parse(cause.detail);
  }
  throw error;
}

type Row = Record<string, unknown>;

/** Shows the first row. */
function show(name: string, [row]: Row[]) {
  console.log(`${name}:`, Object.values(row).map(String).join(" "));
}

const sku = "sku-1";
show("max_token", await prisma.$queryRaw`SELECT tower_fence.max_token(${sku})`);

const acquire = (owner: string) => prisma.$queryRaw<{ token: bigint; lease_id: string }[]>`
  SELECT token, lease_id FROM tower_fence.acquire(${sku}, ${"30 s"}::interval, owner => ${owner})`;
const [{ token: first, lease_id }] = await acquire("worker-1");
console.log(`acquire: ${first}`);
try {
  await acquire("worker-2");
} catch (error) {
  // Another holder has the lease.
  console.log(`acquire: TF409 ${refusal(error, "TF409").resource}`);
}
const held = prisma.$queryRaw<Row[]>`SELECT resource, token, owner FROM tower_fence.held_leases`;
show("held_leases", await held);

const [{ renew: second }] = await prisma.$queryRaw<{ renew: bigint }[]>`
  SELECT tower_fence.renew(${sku}, ${lease_id}, new_token => true, ttl_ms => ${30_000})`;
console.log(`renew: ${second}`);

show("admit", await setStock(sku, second, 9));
try {
  await setStock(sku, first, 100);
  throw new Error("the stale token was admitted");
} catch (error) {
  const stale = refusal(error, "TF412");
  console.log(`admit: TF412 ${stale.presented_token} ${stale.max_token}`);
}

await prisma.$transaction(async (tx) => {
  const field = `${second};resource="sku-1", 7;resource="sku-2"`; // the unparsed header
  show("admit_header", await tx.$queryRaw`SELECT tower_fence.admit_header(${field}, ${"sku-2"})`);
  await tx.inventory.update({ where: { sku: "sku-2" }, data: { stock: 4 } });
});

show("release", await prisma.$queryRaw`SELECT tower_fence.release(${sku}, ${lease_id})`);
show("break_lease", await prisma.$queryRaw`SELECT tower_fence.break_lease(${sku})`);
show("raise", await prisma.$queryRaw`SELECT tower_fence.raise(${sku}, ${5_000_000_000n})`);
show("max_token", await prisma.$queryRaw`SELECT tower_fence.max_token(${sku})`);

show("protect", await prisma.$queryRaw`SELECT tower_fence.protect(${"inventory"}, ${"{sku}"})`);
try {
  await prisma.inventory.updateMany({ data: { stock: 0 } });
  throw new Error("a protected table was written without an admission");
} catch (error) {
  console.log(`unfenced write: TF428 ${refusal(error, "TF428").resource}`);
}
await prisma.$transaction(async (tx) => {
  show("bypass", await tx.$queryRaw`SELECT tower_fence.bypass(${"counted by hand"})`);
  await tx.inventory.update({ where: { sku }, data: { stock: 8 } });
});
show("unprotect", await prisma.$queryRaw`SELECT tower_fence.unprotect(${"inventory"})`);

// The procedure commits, so it is called outside a transaction.
const [age, ms] = ["30 days", 2_592_000_000];
show("remove_idle", await prisma.$queryRaw`
  CALL tower_fence.remove_idle(${age}::interval, max_rows => 1)`);
show("remove_idle", await prisma.$queryRaw`CALL tower_fence.remove_idle(older_than_ms => ${ms})`);

const rows = await prisma.inventory.findMany({ orderBy: { sku: "asc" } });
console.log("stock:", rows.map((row) => row.stock).join(" "));
await prisma.$disconnect();

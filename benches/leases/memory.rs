//! The memory that Redis uses for resources that were locked once, and for held leases.

use std::time::Duration;

use tower_fence::{
    Resource,
    lease::{Acquire, Leases, RedisLeases},
};

use crate::{
    contenders::USUAL,
    store::Store,
    support::{options::Options, report::Report},
};

/// Number of concurrent tasks.
const TASKS: usize = 64;

/// A TTL that is longer than the bench.
const TTL: Duration = Duration::from_secs(3_600);

pub fn measure(store: &Store, options: &Options, report: &mut Report) {
    let title = "Memory of Redis";
    if !options.wants(title) {
        return;
    }
    let (touched, held) = if options.quick {
        (20_000, 10_000)
    } else {
        (1_000_000, 100_000)
    };
    let mut rows = vec![row(["", "bytes", "bytes each", "keys"])];
    let leases = store.leases("memory");
    // The scripts and connections are excluded from the measurement.
    store.runtime.block_on(touch(&leases, 0, true));
    let mut tell = |what: String, before: u64, keys_before: u64, each: usize| {
        let bytes = used(store).saturating_sub(before);
        let keys: u64 = store.query(&["DBSIZE"]);
        let keys = keys - keys_before;
        let of_each = bytes as f64 / each as f64;
        rows.push(row([
            &what,
            &bytes.to_string(),
            &format!("{of_each:.1}"),
            &keys.to_string(),
        ]));
    };
    let (before, keys) = (used(store), store.query(&["DBSIZE"]));
    store.runtime.block_on(in_tasks(&leases, touched, true));
    tell(
        format!("{touched} locked and released"),
        before,
        keys,
        touched,
    );
    let (before, keys) = (used(store), store.query(&["DBSIZE"]));
    store.runtime.block_on(in_tasks(&leases, held, false));
    tell(format!("{held} held"), before, keys, held);
    let (before, keys) = (used(store), store.query(&["DBSIZE"]));
    store.runtime.block_on(async {
        let usual = store.usual();
        for n in 0..held {
            let id = usual.try_lock(&format!("usual-{n}"), TTL).await;
            assert!(id.is_some(), "it is free");
        }
    });
    tell(format!("{held} held, {USUAL}"), before, keys, held);
    report.table(title, &rows);
}

fn row(cells: [&str; 4]) -> Vec<String> {
    cells.map(str::to_owned).to_vec()
}

fn used(store: &Store) -> u64 {
    let _: String = store.query(&["MEMORY", "PURGE"]);
    store.info("memory", "used_memory")
}

async fn in_tasks(leases: &RedisLeases, count: usize, release: bool) {
    let task = |task: usize| {
        let leases = leases.clone();
        tokio::spawn(async move {
            for n in (task..count).step_by(TASKS) {
                touch(&leases, n, release).await;
            }
        })
    };
    let tasks: Vec<_> = (0..TASKS).map(task).collect();
    for task in tasks {
        task.await.expect("it is free");
    }
}

async fn touch(leases: &RedisLeases, n: usize, release: bool) {
    let resource = Resource::new(format!("resource-{n}")).expect("a name");
    let lease = leases.acquire(&resource, Acquire::new(TTL)).await;
    let lease = lease.expect("it is free");
    if release {
        let released = leases.release(&resource, &lease.id).await;
        released.expect("it was held");
    }
}

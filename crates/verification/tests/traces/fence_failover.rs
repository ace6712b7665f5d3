//! The failover of a trace, simulated in one database: the last transactions are undone, and the
//! database reports another timeline.

use tower_fence::{
    Resource,
    epochs::{Epoch, Epochs, partition_of},
};

use crate::support::database::{Fresh, TestDatabase};

/// The last token of epoch 1,001: the highest stale token after one failover in epoch 1.
pub const HIGHEST_STALE: i64 = 1_001_999_999_999;

/// Returns the real token for a token of the model. A failover moves the tokens of the model up by
/// `moved`, and real tokens by 1,000 epochs.
pub fn real_token(token: u8, moved: u8) -> i64 {
    match token.checked_sub(moved) {
        None => token.into(),
        Some(above) => HIGHEST_STALE + i64::from(above),
    }
}

/// Resets the database to a state in which no failover has happened and each partition is in epoch
/// 1.
pub async fn forget<DB: TestDatabase>(db: &Fresh<DB>) {
    db.execute(
        "UPDATE tower_fence.floors SET floor = 0, failover_floor = 0, history = tower_fence.current_history(), \
             unchanged_histories = ARRAY[tower_fence.current_history()]; \
         DELETE FROM tower_fence.epochs; \
         INSERT INTO tower_fence.epochs (partition, epoch) SELECT generate_series(0, 255), 1",
    )
    .await;
}

/// Takes the next epoch for the partition of a resource.
pub async fn hand_out<DB: TestDatabase>(db: &Fresh<DB>, resource: &Resource) {
    let partition = partition_of(resource);
    let epoch = db.fence().next_epoch(partition, Epoch::FIRST).await;
    assert!(epoch.unwrap() > Epoch::new(1_001).unwrap());
}

pub async fn catch_up<DB: TestDatabase>(db: &Fresh<DB>, resource: &Resource) {
    db.execute(&format!("SELECT tower_fence.catch_up('{resource}')"))
        .await;
}

/// The contents of a standby for some resources: their rows and data, the floors of all partitions,
/// and the idempotency keys with the names of the resources.
pub struct Standby {
    /// The names of the resources, as an SQL list.
    names: String,
}

impl Standby {
    pub async fn of<DB: TestDatabase>(db: &Fresh<DB>, resources: &[Resource]) -> Self {
        let names = resources.iter().map(|resource| format!("'{resource}'"));
        let names = names.collect::<Vec<_>>().join(", ");
        let tables = [
            ("tower_fence.resources", format!("resource IN ({names})")),
            ("tower_fence.idempotency_keys", format!("key IN ({names})")),
            ("tower_fence.floors", "true".to_owned()),
            ("stock", format!("sku IN ({names})")),
        ];
        let copies = tables.map(|(table, which)| {
            let copy = table.trim_start_matches("tower_fence.");
            format!(
                "DROP TABLE IF EXISTS standby_{copy}; \
                 CREATE TABLE standby_{copy} AS SELECT * FROM {table} WHERE {which};"
            )
        });
        db.execute(&copies.join(" ")).await;
        Self { names }
    }

    /// Promotes the standby, on the next timeline.
    pub async fn promote<DB: TestDatabase>(self, db: &Fresh<DB>) {
        let names = self.names;
        db.execute(&format!(
            "DO $$ DECLARE \
                 here text := tower_fence.current_history(); \
                 number bigint := ('x' || right(here, 8))::bit(32)::bigint + 1; \
             BEGIN \
                 DELETE FROM tower_fence.resources WHERE resource IN ({names}); \
                 INSERT INTO tower_fence.resources SELECT * FROM standby_resources; \
                 DELETE FROM tower_fence.idempotency_keys WHERE key IN ({names}); \
                 INSERT INTO tower_fence.idempotency_keys SELECT * FROM standby_idempotency_keys; \
                 UPDATE stock AS s SET n = o.n FROM standby_stock AS o WHERE o.sku = s.sku; \
                 UPDATE tower_fence.floors AS l SET floor = o.floor \
                     FROM standby_floors AS o WHERE o.partition = l.partition; \
                 EXECUTE format( \
                     'CREATE OR REPLACE FUNCTION tower_fence.current_history() RETURNS text LANGUAGE sql AS %L', \
                     format('SELECT %L::text', left(here, 2) || lpad(upper(to_hex(number)), 8, '0')) \
                 ); \
             END $$"
        ))
        .await;
    }
}

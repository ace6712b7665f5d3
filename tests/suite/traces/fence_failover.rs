//! The failover of a trace: a database that has lost its last transactions and says that it is on another time line.

use tower_fence::{
    Resource,
    epochs::{Epoch, Epochs},
};

use crate::support::database::{Fresh, TestDatabase};

/// The last token of epoch 1,001: what is dead after one failover in epoch 1.
pub const DEAD: i64 = 1_001_999_999_999;

/// As if there had been no failover, and epoch 1 was handed out everywhere.
pub async fn forget<DB: TestDatabase>(db: &Fresh<DB>) {
    db.execute(
        "UPDATE fence_floors SET floor = 0, failover_floor = 0, history = fence_history(); \
         DELETE FROM fence_epochs; \
         INSERT INTO fence_epochs (partition, epoch) SELECT generate_series(0, 255), 1",
    )
    .await;
}

/// Has the next epoch handed out for a resource.
pub async fn hand_out<DB: TestDatabase>(db: &Fresh<DB>, resource: &Resource) {
    let partition = crc32fast::hash(resource.as_str().as_bytes()).to_le_bytes()[0];
    let epoch = db.fence().next_epoch(partition, Epoch::FIRST).await;
    assert!(epoch.unwrap() > Epoch::new(1_001).unwrap());
}

pub async fn catch_up<DB: TestDatabase>(db: &Fresh<DB>, resource: &Resource) {
    db.execute(&format!("SELECT fence_catch_up('{resource}')"))
        .await;
}

/// What a standby has of a resource, and of the key of the same name.
pub struct Standby {
    n: i64,
}

impl Standby {
    pub async fn of<DB: TestDatabase>(db: &Fresh<DB>, resource: &Resource) -> Self {
        db.execute(&format!(
            "CREATE TABLE IF NOT EXISTS standby AS SELECT * FROM fence_resources WHERE false; \
             DELETE FROM standby; \
             INSERT INTO standby SELECT * FROM fence_resources WHERE resource = '{resource}'; \
             CREATE TABLE IF NOT EXISTS standby_keys AS SELECT * FROM fence_idempotency_keys WHERE false; \
             DELETE FROM standby_keys; \
             INSERT INTO standby_keys SELECT * FROM fence_idempotency_keys WHERE key = '{resource}'"
        ))
        .await;
        let n = format!("SELECT n FROM stock WHERE sku = '{resource}'");
        Self {
            n: db.number(&n).await,
        }
    }

    /// Has it take over, on the next time line.
    pub async fn promote<DB: TestDatabase>(self, db: &Fresh<DB>, resource: &Resource) {
        let n = self.n;
        db.execute(&format!(
            "DO $$ DECLARE \
                 here text := fence_history(); \
                 number bigint := ('x' || right(here, 8))::bit(32)::bigint + 1; \
             BEGIN \
                 DELETE FROM fence_resources WHERE resource = '{resource}'; \
                 INSERT INTO fence_resources SELECT * FROM standby; \
                 DELETE FROM fence_idempotency_keys WHERE key = '{resource}'; \
                 INSERT INTO fence_idempotency_keys SELECT * FROM standby_keys; \
                 UPDATE stock SET n = {n} WHERE sku = '{resource}'; \
                 EXECUTE format( \
                     'CREATE OR REPLACE FUNCTION fence_history() RETURNS text LANGUAGE sql AS %L', \
                     format('SELECT %L::text', left(here, 2) || lpad(upper(to_hex(number)), 8, '0')) \
                 ); \
             END $$"
        ))
        .await;
    }
}

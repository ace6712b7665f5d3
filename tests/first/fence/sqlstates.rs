//! The meaning of the SQLSTATEs of Postgres at an admission, in a statement, and at COMMIT.

use std::{fmt::Debug, time::Duration};

use sqlx::{Postgres, query};
use tower_fence::TokenUse;

use crate::support::{
    database::{Fresh, TestDatabase},
    fence::{begin, insert, sku, token},
};

/// Returns a database that fails at a given place: at an admission, in a statement, or at COMMIT.
async fn that_can_fail() -> Fresh<Postgres> {
    let db = Postgres::fresh(2).await;
    db.fence().raise(&sku(), token(1)).await.unwrap();
    db.execute(
        "CREATE TABLE planned (place TEXT, code TEXT);
         CREATE FUNCTION fails() RETURNS trigger LANGUAGE plpgsql AS $$
         DECLARE planned text := (SELECT t.code FROM public.planned AS t WHERE t.place = TG_ARGV[0]);
         BEGIN
             IF planned IS NOT NULL THEN
                 RAISE EXCEPTION 'as planned' USING ERRCODE = planned;
             END IF;
             RETURN NEW;
         END $$;
         CREATE TRIGGER fails BEFORE UPDATE ON tower_fence.resources
             FOR EACH ROW EXECUTE FUNCTION fails('admission');
         CREATE TRIGGER fails BEFORE INSERT ON ledger
             FOR EACH ROW EXECUTE FUNCTION fails('statement');
         CREATE CONSTRAINT TRIGGER fails_at_commit AFTER INSERT ON ledger DEFERRABLE INITIALLY DEFERRED
             FOR EACH ROW EXECUTE FUNCTION fails('commit')",
    )
    .await;
    db
}

async fn set_failure(db: &Fresh<Postgres>, place: &str, code: &str) {
    db.execute(&format!(
        "TRUNCATE planned; INSERT INTO planned VALUES ('{place}', '{code}')"
    ))
    .await;
}

/// Returns the names of the variants.
fn name(error: impl Debug) -> String {
    let text = format!("{error:?}");
    let names = text.split_once("(Database").map(|(names, _)| names);
    names.unwrap_or(&text).to_owned()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_sqlstate_has_its_meaning() {
    const INSERT: &str = "INSERT INTO ledger SELECT 1 FROM fence RETURNING entry";
    let db = that_can_fail().await;
    let fence = db.fence_with(|fence| fence.lock_timeout(Duration::from_millis(100)));
    #[rustfmt::skip]
    let rows = [
        (&["55P03", "57014", "40P01", "40001"][..], "Busy", "Admit(Busy", "Busy"),
        (&["0A000"], "Unavailable", "Unsupported", "Aborted"),
        (&["42P01", "42703", "42883"], "NotMigrated", "Statement", "Aborted"),
        (&["TF428"], "Unavailable", "Statement", "Unfenced"),
        // A pooler reports a lost server with these codes.
        (&["08003", "08006", "57P01"], "Unavailable", "Commit(OutcomeUnknown", "OutcomeUnknown"),
        (&["25006"], "Unavailable", "Admit(Unavailable", "Unavailable"),
        (&["23505", "25P03", "25P04"], "Unavailable", "Statement", "Aborted"),
    ];
    for (codes, at_admission, in_statement, at_commit) in rows {
        for code in codes {
            set_failure(&db, "admission", code).await;
            let refused = fence.begin(&sku(), token(2), TokenUse::Reusable).await;
            assert_eq!(name(refused.unwrap_err()), at_admission, "{code}");

            set_failure(&db, "statement", code).await;
            let (reusable, insert_one) = (TokenUse::Reusable, query(INSERT));
            let written = fence
                .write::<(i64,)>(&sku(), token(2), reusable, insert_one)
                .await;
            assert_eq!(name(written.unwrap_err()), in_statement, "{code}");

            set_failure(&db, "commit", code).await;
            let mut tx = begin(&fence, 2).await;
            insert(&mut tx, 1).await;
            assert_eq!(name(tx.commit().await.unwrap_err()), at_commit, "{code}");
        }
    }
    assert_eq!(db.entries().await, 0);
}

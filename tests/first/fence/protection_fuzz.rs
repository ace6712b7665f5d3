//! Random statements on protected tables. Without admissions, a statement writes nothing. With
//! admissions, it has the same effect as on an unprotected table.

use std::collections::BTreeSet;

use rand::{RngExt, SeedableRng, rngs::StdRng, seq::IndexedRandom};

use super::protection::{admissions, rows, with_tables};
use crate::support::functions::in_transaction;

const ROUNDS: usize = 300;
const RESOURCES: [&str; 5] = ["a", "b", "c", "d", "e"];

/// The contents of all tables, restored every few rounds.
const FILL: &str =
    "TRUNCATE {t}; INSERT INTO {t} SELECT i, chr(97 + i % 5), i FROM generate_series(1, 12) AS i";

/// Returns one statement on `{t}`, or several that belong together.
fn statement(random: &mut StdRng, depth: usize) -> String {
    let [some, other, third] = [(); 3].map(|()| *RESOURCES.choose(random).unwrap());
    let [first, second] = [(); 2].map(|()| random.random_range(1..15));
    let condition = match random.random_range(0..6) {
        0 => "true".to_owned(),
        1 => format!("id < {first}"),
        2 => format!("sku IN ('{some}', '{other}')"),
        3 => "false".to_owned(),
        _ => format!("sku = '{some}'"),
    };
    let values = format!("({first}, '{some}', 1), ({second} + 14, '{other}', 2)");
    // All ids above this maximum are free. With ids in use, the effect of a statement would depend
    // on the order of the rows.
    let free = "(SELECT max(id) FROM {t})";
    match random.random_range(if depth == 0 { 4..15 } else { 0..15 }) {
        0 => format!(
            "SAVEPOINT s; {}; ROLLBACK TO s",
            statement(random, depth - 1)
        ),
        1 => format!("SAVEPOINT s; {}; RELEASE s", statement(random, depth - 1)),
        2 => format!(
            "{}; {}",
            statement(random, depth - 1),
            statement(random, depth - 1)
        ),
        3 => format!(
            "DO $$ BEGIN UPDATE {{t}} SET n = 3 WHERE {condition}; INSERT INTO {{t}} VALUES {values}; \
             EXCEPTION WHEN unique_violation THEN DELETE FROM {{t}} WHERE sku = '{third}'; END $$"
        ),
        4 => format!("INSERT INTO {{t}} VALUES {values} ON CONFLICT DO NOTHING"),
        5 => format!(
            "INSERT INTO {{t}} VALUES {values} ON CONFLICT (id, sku) DO UPDATE SET n = excluded.n + 5"
        ),
        6 => format!("INSERT INTO {{t}} SELECT id + {free}, sku, n FROM {{t}} WHERE {condition}"),
        7 => format!("UPDATE {{t}} SET n = n + 1 WHERE {condition}"),
        8 => format!("UPDATE {{t}} SET sku = '{other}', id = id + {free} WHERE {condition}"),
        9 => format!("UPDATE {{t}} SET sku = '{other}' WHERE id = {first}"),
        10 => format!("DELETE FROM {{t}} WHERE {condition}"),
        11 => format!("DELETE FROM {{t}} USING (VALUES ({first})) AS v (id) WHERE {{t}}.id = v.id"),
        12 => format!(
            "MERGE INTO {{t}} AS t USING (VALUES {values}) AS s (id, sku, n) ON t.id = s.id \
             WHEN MATCHED AND t.n > 5 THEN DELETE \
             WHEN MATCHED THEN UPDATE SET sku = s.sku, id = t.id + {free}, n = t.n + 1 \
             WHEN NOT MATCHED THEN INSERT VALUES (s.id, s.sku, s.n)"
        ),
        13 => format!(
            "WITH gone AS (DELETE FROM {{t}} WHERE {condition} RETURNING *) \
             INSERT INTO {{t}} SELECT id + {free}, '{third}', n FROM gone"
        ),
        _ if random.random_bool(0.3) => "TRUNCATE {t}".to_owned(),
        _ => format!(
            "WITH a AS (UPDATE {{t}} SET n = 7 WHERE {condition} RETURNING 1) SELECT count(*) FROM a"
        ),
    }
}

/// Returns the resources of the rows that are in only one of the two lists.
fn changed(before: &str, after: &str) -> BTreeSet<String> {
    let [before, after] = [before, after].map(|rows| rows.split(' ').collect::<BTreeSet<_>>());
    let changed = before.symmetric_difference(&after);
    // The columns are (id,sku,n).
    changed
        .filter_map(|row| Some(row.split(',').nth(1)?.to_owned()))
        .collect()
}

#[tokio::test]
async fn writes_succeed_only_with_their_admission() {
    let db = with_tables().await;
    let seed = rand::random::<u64>();
    println!("the seed is {seed}");
    let mut random = StdRng::seed_from_u64(seed);
    let mut conn = db.pool.acquire().await.unwrap();
    let (mut refused, mut written) = (0, 0);
    for round in 0..ROUNDS {
        if round % 5 == 0 {
            for table in ["whole", "parts", "twin"] {
                let fill = format!("{}{}", admissions(RESOURCES), FILL.replace("{t}", table));
                in_transaction(&mut conn, &fill).await.unwrap();
            }
        }
        let statement = statement(&mut random, 2);
        let before = rows(&mut conn, "twin").await;
        let expected = in_transaction(&mut conn, &statement.replace("{t}", "twin")).await;
        let after = rows(&mut conn, "twin").await;
        for table in ["whole", "parts"] {
            let one = statement.replace("{t}", table);
            let mut admitted: BTreeSet<String> = BTreeSet::new();
            if random.random_bool(0.5) {
                admitted.insert((*RESOURCES.choose(&mut random).unwrap()).into());
            }
            // Admits each resource that the refusal names, and tries again.
            let outcome = loop {
                let attempt = format!("{}{one}", admissions(admitted.iter().map(String::as_str)));
                match in_transaction(&mut conn, &attempt).await {
                    Err(error) if error.code == "TF428" => {
                        refused += 1;
                        let found = rows(&mut conn, table).await;
                        assert_eq!(found, before, "{attempt} was refused, and has written");
                        let missing = error.message.rsplit(' ').next().unwrap().to_owned();
                        let is_new = admitted.insert(missing);
                        assert!(
                            is_new,
                            "{attempt} is refused, though it was admitted: {error:?}"
                        );
                    }
                    outcome => break outcome,
                }
            };
            let (code, expected) = (outcome.map_err(|error| error.code), &expected);
            let expected = expected.as_ref().err().map(|error| &error.code);
            assert_eq!(code.as_ref().err(), expected, "{one}");
            let found = rows(&mut conn, table).await;
            let unfenced = &changed(&before, &found) - &admitted;
            assert_eq!(found, after, "{one}");
            assert!(unfenced.is_empty(), "{one}: {unfenced:?} not admitted");
        }
        written += usize::from(before != after);
    }
    println!("{refused} refused, {written} of {ROUNDS} have written");
    assert!(
        refused > ROUNDS && written > ROUNDS / 4,
        "{refused} {written}"
    );
}

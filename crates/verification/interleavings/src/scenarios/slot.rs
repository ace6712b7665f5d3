//! The transaction that the layer lends to its handler. The handler may keep the transaction for
//! any time.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering::SeqCst},
};

use super::{all, resource, some_ms, tasks};
use crate::{
    fence::{
        claims::Claims,
        tx::slot::{Place, Slot},
    },
    model::{
        clock::sleep,
        runtime::spawn,
        sqlx::Model,
        transaction::{Fate, Transaction},
    },
    token::Token,
};
use shuttle::rand::{Rng, thread_rng};

/// Two tasks of a handler borrow the transaction, and the layer closes its slot. The layer's answer
/// stays true.
///
/// If a transaction returns to a closed slot, it is discarded, and its connection is closed. The
/// connection must not return to the pool, because the layer may be ending its session on the
/// server, and another request could already use that session.
pub async fn answer_stays_true() {
    let fate = Arc::<Fate>::default();
    let claims = Claims::one(resource(), Token::new(1).unwrap());
    let slot = Slot::<Model>::new(Transaction::begin(&fate), claims, vec![]);
    let lent = Arc::new(AtomicBool::new(false));
    let escaped = Arc::new(AtomicBool::new(false));
    let borrowers = tasks(2, |_| {
        let (slot, lent) = (slot.clone(), lent.clone());
        async move {
            sleep(some_ms([0, 1])).await;
            let Some(transaction) = slot.lend() else {
                return;
            };
            assert!(!lent.swap(true, SeqCst), "two tasks have the transaction");
            sleep(some_ms([0, 1, 3])).await;
            lent.store(false, SeqCst);
            // The first branch is the drop of a `FencedTx`, and the second is its commit.
            if thread_rng().gen_bool(0.5) {
                slot.give_back(transaction);
            } else if slot.start_commit() {
                transaction.commit().await;
                slot.settle(Ok(()));
            } else {
                transaction.discard();
            }
        }
    });
    let layer = spawn({
        let escaped = escaped.clone();
        async move {
            sleep(some_ms([0, 1, 3])).await;
            let closed = slot.close();
            assert!(closed.permits.is_empty());
            match closed.place {
                Place::WithLayer { transaction, .. } => {
                    transaction.commit().await;
                    Some(1)
                }
                Place::Settled(outcome) => {
                    outcome.unwrap();
                    Some(1)
                }
                Place::Lent => {
                    assert!(closed.id.is_some());
                    escaped.store(true, SeqCst);
                    Some(0)
                }
                // The outcome of the commit is unknown.
                Place::Committing => None,
                _ => panic!("the transaction was admitted"),
            }
        }
    });
    let answered = layer.await.unwrap();
    all(borrowers).await;
    assert!(
        !(escaped.load(SeqCst) && fate.is_in_pool.load(SeqCst)),
        "the pool has a connection whose session the layer ends"
    );
    let commits = fate.commits.load(SeqCst);
    assert!(commits <= 1, "committed twice");
    assert!(
        answered.is_none_or(|answered| answered == commits),
        "{answered:?}: {commits}"
    );
}

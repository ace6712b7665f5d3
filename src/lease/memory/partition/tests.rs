use tokio::time::advance;

use super::*;
use crate::lease::LeaseId;

const TTL: Duration = Duration::from_millis(10);
const LONG: Duration = Duration::from_secs(600);

/// Client that requests a lease, and may wait in the queue.
struct Asker(Ask);

impl Asker {
    fn new(ttl: Duration) -> Self {
        Self(Ask {
            lease: LeaseDigest::of(LeaseId::random().expose()),
            ticket: rand::random_range(1..=i64::MAX),
            ttl,
            lock_delay: Duration::ZERO,
            owner: None,
        })
    }

    fn reply(&self, partition: &mut Partition, queued: bool) -> Reply {
        let waits = Waits::Yes {
            listener: "".into(),
            left: LONG,
            queued,
        };
        partition.acquire(&sku(), &self.0, &waits)
    }

    /// Requests the lease. Returns the token if the lease is granted.
    fn ask(&self, partition: &mut Partition) -> Option<i64> {
        match self.reply(partition, false) {
            Reply::Granted(granted) => Some(granted.token.get()),
            _ => None,
        }
    }

    fn leave(&self, partition: &mut Partition) {
        let (lease, ticket) = (self.0.lease.clone(), self.0.ticket);
        partition.end(&sku(), &End::Abandon { lease, ticket });
    }

    fn release(&self, partition: &mut Partition) {
        let released = partition.end(&sku(), &End::Release(self.0.lease.clone()));
        assert!(matches!(released, Reply::Ended));
    }

    fn is_called(&self, partition: &mut Partition) -> bool {
        let before = partition.calls.len();
        partition.calls.retain(|ticket| *ticket != self.0.ticket);
        partition.calls.len() < before
    }
}

fn sku() -> Resource {
    Resource::new("sku-1").unwrap()
}

fn epoch(number: i64) -> Epoch {
    Epoch::new(number).unwrap()
}

/// Returns the token of this epoch with this number.
fn token(number: i64, n: i64) -> Option<i64> {
    epoch(number).token(n).map(Token::get)
}

/// Creates a partition in its first epoch.
fn partition() -> Partition {
    let mut partition = Partition::default();
    partition.begin_epoch(epoch(1));
    partition
}

#[tokio::test(start_paused = true)]
async fn newcomer_after_expiry_is_queued_behind_the_waiters() {
    let (mut partition, holder) = (partition(), Asker::new(TTL));
    let (waiting, newcomer) = (Asker::new(LONG), Asker::new(LONG));
    assert_eq!(holder.ask(&mut partition), token(1, 1));
    assert_eq!(waiting.ask(&mut partition), None);
    assert_eq!(
        holder.ask(&mut partition),
        token(1, 1),
        "the request is repeated"
    );
    // The lease expires at exactly this time.
    advance(TTL).await;
    assert_eq!(newcomer.ask(&mut partition), None);
    assert!(waiting.is_called(&mut partition));
    assert_eq!(waiting.ask(&mut partition), token(1, 2));
    newcomer.leave(&mut partition);
    assert!(partition.queues.is_empty(), "an empty queue is kept");
}

/// Checks that the first request in the queue begins the epoch, and keeps its position in the
/// meantime.
#[tokio::test(start_paused = true)]
async fn first_waiter_keeps_its_position_while_an_epoch_begins() {
    let (mut partition, holder) = (partition(), Asker::new(LONG));
    let (first, second) = (Asker::new(LONG), Asker::new(LONG));
    partition.use_up(1);
    holder.ask(&mut partition);
    assert_eq!(first.ask(&mut partition), None);
    assert_eq!(second.ask(&mut partition), None);
    partition.calls.clear();
    holder.release(&mut partition);
    assert!(first.is_called(&mut partition) && !second.is_called(&mut partition));
    partition.begin_epoch(epoch(2));
    assert_eq!(first.ask(&mut partition), token(2, 1));
    assert_eq!(second.ask(&mut partition), None);
}

#[tokio::test(start_paused = true)]
async fn epoch_begins_once_and_not_during_another() {
    let (mut partition, holder) = (partition(), Asker::new(LONG));
    partition.use_up(0);
    partition.begin_epoch(epoch(1));
    assert_eq!(
        holder.ask(&mut partition),
        None,
        "the epoch has begun a second time"
    );
    partition.begin_epoch(epoch(3));
    partition.begin_epoch(epoch(2));
    partition.begin_epoch(epoch(4));
    assert_eq!(holder.ask(&mut partition), token(3, 1));
}

#[tokio::test(start_paused = true)]
async fn end_of_an_epoch_ends_leases_and_wakes_waiters() {
    let (mut partition, holder) = (partition(), Asker::new(LONG));
    let waiting = Asker::new(LONG);
    assert_eq!(holder.ask(&mut partition), token(1, 1));
    assert_eq!(waiting.ask(&mut partition), None);
    partition.calls.clear();
    // A token that the counter itself has reached does not end the epoch.
    partition.end_epoch((1, 1));
    assert_eq!(holder.ask(&mut partition), token(1, 1));
    partition.calls.clear();
    partition.end_epoch((4, 7));
    assert!(waiting.is_called(&mut partition));
    assert_eq!(waiting.ask(&mut partition), token(4, 8));
}

//! The outbox in real processes. The test freezes the relays in turn, and the subscriber still
//! receives the events in order.

use sqlx::Postgres;

use crate::support::{
    database::{Fresh, TestDatabase},
    eventually,
    process::Process,
};

const ROUNDS: usize = 3;

/// The number of price changes in one round.
const CHANGES: usize = 10;

/// Statements that create a trigger, which resets `max_token` at each write, so that stale tokens
/// are admitted.
const NO_FENCE: &str = "
    CREATE FUNCTION forget() RETURNS trigger LANGUAGE plpgsql
        AS 'BEGIN NEW.max_token := 0; RETURN NEW; END';
    CREATE TRIGGER forget BEFORE INSERT OR UPDATE ON tower_fence.resources
        FOR EACH ROW EXECUTE FUNCTION forget();
";

/// An event that the subscriber received.
#[derive(Debug)]
struct Heard {
    event: i64,
    sku: String,
    token: i64,
}

struct Outbox {
    shop: Fresh<Postgres>,
    /// The database of the subscriber.
    listener: Fresh<Postgres>,
    subscriber: Process,
}

impl Outbox {
    async fn start() -> Self {
        let [shop, listener] = [Postgres::fresh(2).await, Postgres::fresh(2).await];
        let variables = [
            ("DATABASE_URL", listener.url.as_str()),
            ("SUBSCRIBER_ADDR", "127.0.0.1:0"),
        ];
        let mut subscriber = Process::start("outbox", &["subscriber"], &variables);
        subscriber.prints("listens on http://", 1).await;
        subscriber.prints("\n", 1).await;
        Self {
            shop,
            listener,
            subscriber,
        }
    }

    fn process(&self, role: &str, pace: &str) -> Process {
        let listens = self.subscriber.stdout();
        let (_, address) = listens.trim_end().split_once("http://").unwrap();
        let variables = [
            ("DATABASE_URL", self.shop.url.as_str()),
            ("SUBSCRIBER_ADDR", address),
            ("TTL_MS", "1500"),
            ("PACE_MS", pace),
            ("CHANGES", &CHANGES.to_string()),
        ];
        Process::start("outbox", &[role], &variables)
    }

    async fn change_prices(&self) {
        let mut shop = self.process("shop", "1");
        assert!(shop.exit().await.success(), "{}", shop.log());
    }

    fn relays(&self) -> [Process; 2] {
        [(); 2].map(|()| self.process("relay", "50"))
    }

    /// Freezes a working relay until the other relay has sent some events.
    async fn freeze_in_turn(&self, relays: &mut [Process; 2]) {
        self.change_prices().await;
        let frozen = freeze_one_that_works(relays).await;
        let reports_before = reports_of(&relays[frozen]);
        let sent = count(&relays[1 - frozen], "sends event");
        // On a slow machine the relay may have sent all events before it was frozen.
        self.change_prices().await;
        let other = &mut relays[1 - frozen];
        other.prints("sends event", sent + 4).await;
        relays[frozen].signal("-CONT");
        // If the resumed relay has an event to send, it sends the event, because it has not
        // detected that its lease is lost. Otherwise it detects the loss.
        let reports = || reports_of(&relays[frozen]);
        eventually!("the relay resumes", reports() > reports_before);
    }

    /// Waits until all events are received.
    async fn is_empty(&self) {
        let left = "SELECT count(*) FROM outbox";
        eventually!("no event is left", self.shop.number(left).await == 0);
    }

    async fn heard(&self) -> Vec<Heard> {
        let heard = sqlx::query_as("SELECT event, sku, token FROM heard ORDER BY position");
        let heard: Vec<_> = heard.fetch_all(&self.listener.pool).await.unwrap();
        let heard = heard.into_iter();
        let named = |(event, sku, token)| Heard { event, sku, token };
        heard.map(named).collect()
    }
}

/// Returns the index of a relay that was frozen while it worked. On a slow machine a relay may lose
/// its lease at any moment, so the state is checked again after the freeze.
async fn freeze_one_that_works(relays: &[Process; 2]) -> usize {
    let mut frozen = None;
    eventually("a relay works", async || {
        frozen = (0..2).find(|&n| {
            let relay = &relays[n];
            works(relay) && {
                relay.signal("-STOP");
                works(relay) || {
                    relay.signal("-CONT");
                    false
                }
            }
        });
        frozen.is_some()
    })
    .await;
    frozen.unwrap()
}

/// Whether the relay has sent an event under its current lease, and has not stopped.
fn works(relay: &Process) -> bool {
    let text = relay.stdout();
    let since = text.rsplit_once("has the lease").map(|(_, since)| since);
    since.is_some_and(|since| since.contains("sends event") && !since.contains("stops"))
}

/// Returns how often the relay has sent an event or stopped.
fn reports_of(relay: &Process) -> usize {
    count(relay, "sends event") + count(relay, "stops")
}

fn count(process: &Process, text: &str) -> usize {
    process.stdout().matches(text).count()
}

/// Returns the events that were received after a later event of their SKU.
fn late(heard: &[Heard]) -> Vec<&Heard> {
    let is_late = |&(n, event): &(usize, &Heard)| {
        let mut before = heard[..n].iter().filter(|other| other.sku == event.sku);
        before.any(|other| other.event > event.event)
    };
    let late = heard.iter().enumerate().filter(is_late);
    late.map(|(_, event)| event).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn alternately_frozen_relays_send_every_event_in_order() {
    let outbox = Outbox::start().await;
    let mut relays = outbox.relays();
    for _ in 0..ROUNDS {
        outbox.freeze_in_turn(&mut relays).await;
    }
    outbox.is_empty().await;
    let heard = outbox.heard().await;
    assert!(late(&heard).is_empty(), "{heard:?}");
    // Only the successor repeats an event, and only the last event of its predecessor.
    for (n, pair) in heard.windows(2).enumerate() {
        assert!(pair[0].token <= pair[1].token, "{heard:?}");
        let again = heard[..=n].iter().any(|other| other.event == pair[1].event);
        let by_the_successor = pair[0].event == pair[1].event && pair[0].token < pair[1].token;
        assert!(!again || by_the_successor, "{heard:?}");
    }
    let mut events: Vec<_> = heard.iter().map(|heard| heard.event).collect();
    events.sort_unstable();
    events.dedup();
    let changes = 2 * ROUNDS * CHANGES;
    assert_eq!(events.len(), changes);
    for (db, table) in [(&outbox.shop, "price"), (&outbox.listener, "price_list")] {
        let sum = format!("SELECT sum(cents - 99)::bigint FROM {table}");
        assert_eq!(db.number(&sum).await, changes as i64, "{table}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refused_event_delays_only_events_of_its_resource() {
    let outbox = Outbox::start().await;
    let refuse = "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ \
             BEGIN RAISE EXCEPTION 'refused'; END $$; \
         CREATE TRIGGER refuse BEFORE INSERT ON price_list \
             FOR EACH ROW WHEN (NEW.sku = 'sku-2') EXECUTE FUNCTION refuse()";
    outbox.listener.execute(refuse).await;
    outbox.change_prices().await;
    // The other events of the batch take longer than the first pause after a refusal.
    let relay = outbox.process("relay", "200");
    let left = "SELECT count(*) FROM outbox WHERE sku";
    eventually!(
        "the other events are received",
        outbox.shop.number(&format!("{left} <> 'sku-2'")).await == 0
    );
    let refused = "SELECT min(id) FROM outbox";
    let refused = outbox.shop.number(refused).await;
    let refused = format!("event {refused} of sku-2 is refused: ");
    eventually!("the event is retried", count(&relay, &refused) >= 3);
    assert_eq!(outbox.shop.number(&format!("{left} = 'sku-2'")).await, 3);
    let printed = relay.stdout();
    let of_the_first = printed.matches(&refused).count();
    let of_all = printed.matches(" of sku-2 is refused: ").count();
    assert_eq!(of_all, of_the_first, "a later event was sent: {printed}");
    assert_eq!(count(&relay, "has the lease"), 1, "{}", relay.log());
    let allow = "DROP TRIGGER refuse ON price_list";
    outbox.listener.execute(allow).await;
    outbox.is_empty().await;
    let heard = outbox.heard().await;
    let is_complete = heard.len() == CHANGES;
    assert!(late(&heard).is_empty() && is_complete, "{heard:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unfenced_subscriber_receives_late_events_of_the_frozen_relay() {
    let outbox = Outbox::start().await;
    outbox.listener.execute(NO_FENCE).await;
    let mut relays = outbox.relays();
    // If a relay is frozen just after it has sent all events that it has read, no event is late, so
    // the test tries again.
    for _ in 0..10 {
        outbox.freeze_in_turn(&mut relays).await;
        if !late(&outbox.heard().await).is_empty() {
            return;
        }
    }
    panic!("no event was late: {:?}", outbox.heard().await);
}

//! Postgres, as far as the line of waiters uses it: sessions that listen and have locks, and a server that does with one line
//! what the functions do.
//!
//! No lease of it ends by itself. A statement goes on when its caller has gone away. What is notified may be on its way for
//! as long as the scheduler likes, and a session may be cut, with what is on its way there.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Arc, Mutex},
    time::Duration,
};

use shuttle::rand::{Rng, thread_rng};

use super::{clock::sleep, runtime::spawn, step, sync::mpsc};
use crate::announce::LeaseDigest;

/// One that waits, or holds.
#[derive(Clone, Debug)]
pub struct Asked {
    pub lease: LeaseDigest,
    /// Of a holder that asked more than once there is none.
    pub ticket: Option<i64>,
    pub listener: i64,
}

#[derive(Default)]
pub struct Line {
    pub lease: Option<Asked>,
    pub line: VecDeque<Asked>,
    pub tokens: i64,
    begun: u64,
    sessions: BTreeMap<u64, Session>,
}

#[derive(Debug)]
struct Session {
    lock: Option<i64>,
    channel: Option<String>,
    notified: mpsc::UnboundedSender<String>,
}

/// The server. Clones are the same one.
#[derive(Clone, Default)]
pub struct Postgres(Arc<Mutex<Line>>);

impl Postgres {
    /// Runs a statement to its end, also where its caller goes away.
    pub async fn run<T: Send + 'static>(
        &self,
        statement: impl FnOnce(&mut Line) -> T + Send + 'static,
    ) -> T {
        let server = self.clone();
        let run = spawn(async move {
            pause().await;
            let answer = statement(&mut server.0.lock().unwrap());
            pause().await;
            answer
        });
        run.await.unwrap()
    }

    /// Ends all sessions that listen.
    pub fn cut(&self) {
        step();
        self.0.lock().unwrap().sessions.clear();
    }

    fn end(&self, session: u64) {
        step();
        self.0.lock().unwrap().sessions.remove(&session);
    }
}

impl Line {
    pub fn is_waiting(&self, ticket: i64) -> bool {
        self.line.iter().any(|one| one.ticket == Some(ticket))
    }

    pub fn leave(&mut self, ticket: i64) {
        self.line.retain(|one| one.ticket != Some(ticket));
    }

    /// Removes those who hear by a listener that is no more; whether it was one.
    pub fn pass_over(&mut self, listener: i64) -> bool {
        let mut sessions = self.sessions.values();
        if sessions.any(|session| session.lock == Some(listener)) {
            return false;
        }
        self.line.retain(|one| one.listener != listener);
        true
    }

    /// Tells the first in line whose process lives for how long the resource stays closed.
    pub fn tell_first(&mut self, as_long_as_held: Duration) {
        while let Some(first) = self.line.front().cloned() {
            if self.pass_over(first.listener) {
                continue;
            }
            let held = self.lease.as_ref();
            let closed = match held.is_some_and(|held| held.lease != first.lease) {
                true => as_long_as_held.as_millis(),
                false => 0,
            };
            let message = format!("{} {closed}", first.ticket.unwrap());
            let channel = format!("tower_fence_{:x}", first.listener);
            for session in self.sessions.values() {
                if session.channel.as_ref() == Some(&channel) {
                    let _ = session.notified.send_at_once(message.clone());
                }
            }
            return;
        }
    }
}

async fn pause() {
    step();
    let ms = thread_rng().gen_range(0..2);
    sleep(Duration::from_millis(ms)).await;
}

/// What listens, in the manner of sqlx's.
pub mod sessions {
    use std::time::Duration;

    use super::{super::sqlx::Result, Postgres, Session, mpsc};

    #[derive(Clone, Default)]
    pub struct PgConnectOptions(pub Postgres);

    #[derive(Default)]
    pub struct PgPoolOptions;

    impl PgPoolOptions {
        pub fn new() -> Self {
            Self
        }

        pub fn max_connections(self, _: u32) -> Self {
            self
        }

        pub fn max_lifetime(self, _: Option<Duration>) -> Self {
            self
        }

        pub fn idle_timeout(self, _: Option<Duration>) -> Self {
            self
        }

        pub fn acquire_timeout(self, _: Duration) -> Self {
            self
        }

        pub fn connect_lazy_with(self, options: PgConnectOptions) -> Postgres {
            options.0
        }
    }

    /// A session that listens.
    pub struct PgListener {
        server: Postgres,
        session: u64,
        notified: mpsc::UnboundedReceiver<String>,
    }

    pub struct PgNotification(String);

    impl PgNotification {
        pub fn payload(&self) -> &str {
            &self.0
        }
    }

    impl PgListener {
        pub async fn connect_with(server: &Postgres) -> Result<Self> {
            let (sender, notified) = mpsc::unbounded_channel();
            let begin = |line: &mut super::Line| {
                line.begun += 1;
                let session = Session {
                    lock: None,
                    channel: None,
                    notified: sender,
                };
                line.sessions.insert(line.begun, session);
                line.begun
            };
            Ok(Self {
                session: server.run(begin).await,
                server: server.clone(),
                notified,
            })
        }

        pub fn eager_reconnect(&mut self, _: bool) {}

        /// `SELECT pg_catalog.pg_advisory_lock(…)`
        pub async fn execute(
            &mut self,
            lock: super::super::sqlx::AssertSqlSafe<String>,
        ) -> Result<()> {
            let number = lock.0.split(['(', ')']).nth(1).unwrap().parse().unwrap();
            self.change(move |session| session.lock = Some(number))
                .await
        }

        pub async fn listen(&mut self, channel: &str) -> Result<()> {
            let channel = channel.to_owned();
            self.change(|session| session.channel = Some(channel)).await
        }

        /// Nothing where it is cut.
        pub async fn try_recv(&mut self) -> Result<Option<PgNotification>> {
            let notified = self.notified.recv().await;
            let line = self.server.0.lock().unwrap();
            let notified = notified.filter(|_| line.sessions.contains_key(&self.session));
            Ok(notified.map(PgNotification))
        }

        async fn change(
            &mut self,
            change: impl FnOnce(&mut Session) + Send + 'static,
        ) -> Result<()> {
            let session = self.session;
            let changed = self
                .server
                .run(move |line| line.sessions.get_mut(&session).map(change));
            let cut = || std::io::Error::from(std::io::ErrorKind::BrokenPipe);
            Ok(changed.await.ok_or_else(cut)?)
        }
    }

    impl Drop for PgListener {
        fn drop(&mut self) {
            self.server.end(self.session);
        }
    }
}

/// The calls of the functions.
pub mod functions {
    use std::{error::Error, sync::Arc, time::Duration};

    use super::{Asked as Place, Line, Postgres, sessions::PgConnectOptions, spawn};
    use crate::{
        announce::LeaseDigest,
        lease::{Acquire, Held, LeaseError, LeaseId, ListError, Page, Renew},
        token::{Resource, Token},
    };

    const FOR_EVER: Duration = Duration::from_secs(1 << 30);

    /// As the crate's own.
    pub trait LeaseDatabase: Send + Sync + 'static {
        fn server(&self) -> &Postgres;

        fn session_options(&self) -> Option<PgConnectOptions> {
            Some(PgConnectOptions(self.server().clone()))
        }

        fn answer_wait(&self) -> Duration {
            Duration::from_millis(50)
        }

        fn schema(&self) -> std::future::Ready<Result<String, CallError>> {
            std::future::ready(Ok(String::new()))
        }
    }

    pub struct CallError(pub Box<dyn Error + Send + Sync>);

    impl LeaseDatabase for Postgres {
        fn server(&self) -> &Postgres {
            self
        }
    }

    #[derive(Debug)]
    pub enum Asked {
        Granted { token: Token, others_wait: bool },
        Exhausted(i64),
        Held { closed: Duration },
        Queued,
        First { closed: Duration },
        Full,
        Again,
    }

    pub enum Renewed {
        Granted(Token),
        Lost,
        Exhausted(i64),
        Again,
    }

    pub struct Request {
        pub resource: Resource,
        pub ticket: i64,
        lease: LeaseDigest,
    }

    impl Request {
        pub fn new(resource: &Resource, request: &Acquire) -> Self {
            Self {
                resource: resource.clone(),
                lease: LeaseDigest::of(request.lease_id.expose()),
                ticket: rand::random(),
            }
        }
    }

    #[derive(Clone)]
    pub struct Functions {
        pub database: Arc<dyn LeaseDatabase>,
    }

    impl Functions {
        pub async fn ask(
            &self,
            request: &Request,
            in_line: bool,
            listener: Option<i64>,
            _: usize,
        ) -> Result<Asked, LeaseError> {
            let (lease, ticket) = (request.lease.clone(), request.ticket);
            let ask = move |line: &mut Line| ask(line, lease, ticket, in_line, listener);
            Ok(self.run(ask).await)
        }

        pub async fn abandon(&self, request: &Request) -> Result<(), LeaseError> {
            let ticket = request.ticket;
            let abandon = move |line: &mut Line| {
                line.leave(ticket);
                let held = line.lease.as_ref();
                if held.is_some_and(|held| held.ticket == Some(ticket)) {
                    line.lease = None;
                }
                line.tell_first(FOR_EVER);
            };
            Ok(self.run(abandon).await)
        }

        pub async fn end(&self, _: &Resource, id: Option<&LeaseId>) -> Result<bool, LeaseError> {
            let lease = id.map(|id| LeaseDigest::of(id.expose()));
            let end = move |line: &mut Line| {
                let held = line
                    .lease
                    .take_if(|held| lease.is_none_or(|lease| held.lease == lease));
                if held.is_some() {
                    line.tell_first(FOR_EVER);
                }
                held.is_some()
            };
            Ok(self.run(end).await)
        }

        pub async fn call_first(&self, _: &Resource) -> Result<(), LeaseError> {
            Ok(self.run(|line| line.tell_first(FOR_EVER)).await)
        }

        pub fn sweep_in_background(&self) {
            let functions = self.clone();
            spawn(async move {
                let sweep = |line: &mut Line| {
                    for one in line.line.clone() {
                        line.pass_over(one.listener);
                    }
                };
                functions.run(sweep).await;
            });
        }

        pub async fn renew(
            &self,
            _: &Resource,
            _: &LeaseId,
            _: Renew,
        ) -> Result<Renewed, LeaseError> {
            Ok(Renewed::Lost)
        }

        pub async fn inspect(&self, _: &Resource) -> Result<Option<Held>, LeaseError> {
            let inspect = |line: &mut Line| {
                line.lease.as_ref().map(|_| Held {
                    token: Token::new(line.tokens).unwrap(),
                    owner: None,
                    ttl: FOR_EVER,
                    waiters: line.line.len() as u64,
                })
            };
            Ok(self.run(inspect).await)
        }

        pub async fn list(&self, _: usize, _: Option<&str>) -> Result<Page, ListError> {
            Ok(Page::default())
        }

        async fn run<T: Send + 'static>(
            &self,
            statement: impl FnOnce(&mut Line) -> T + Send + 'static,
        ) -> T {
            self.database.server().run(statement).await
        }
    }

    fn ask(
        line: &mut Line,
        lease: LeaseDigest,
        ticket: i64,
        in_line: bool,
        listener: Option<i64>,
    ) -> Asked {
        let in_line = in_line && line.is_waiting(ticket);
        let is_free = loop {
            match (&mut line.lease, line.line.front()) {
                (Some(held), _) if held.lease == lease => {
                    held.ticket = held.ticket.filter(|held| *held == ticket);
                    line.leave(ticket);
                    return granted(line);
                }
                (Some(_), _) => break false,
                (None, Some(first)) if first.ticket != Some(ticket) && first.lease != lease => {
                    let listener = first.listener;
                    if !line.pass_over(listener) {
                        break false;
                    }
                    line.tell_first(FOR_EVER);
                }
                (None, _) => break true,
            }
        };
        if is_free {
            line.tokens += 1;
            line.lease = Some(Place {
                lease,
                ticket: Some(ticket),
                listener: 0,
            });
            line.leave(ticket);
            return granted(line);
        }
        let Some(listener) = listener else {
            line.leave(ticket);
            if in_line {
                line.tell_first(FOR_EVER);
            }
            return Asked::Held { closed: FOR_EVER };
        };
        let first = line.line.front().and_then(|first| first.ticket);
        let mut places = line.line.iter_mut();
        match places.find(|one| one.ticket == Some(ticket)) {
            Some(place) => place.listener = listener,
            None => line.line.push_back(Place {
                lease,
                ticket: Some(ticket),
                listener,
            }),
        }
        match first.is_none_or(|first| first == ticket) {
            true => Asked::First { closed: FOR_EVER },
            false => Asked::Queued,
        }
    }

    fn granted(line: &Line) -> Asked {
        Asked::Granted {
            token: Token::new(line.tokens).unwrap(),
            others_wait: !line.line.is_empty(),
        }
    }
}

//! Listening sessions, with the interface of sqlx.

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

/// A listening session.
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
        let begin = |state: &mut super::State| {
            state.begun += 1;
            let session = Session {
                listener: None,
                channel: None,
                notified: sender,
            };
            state.sessions.insert(state.begun, session);
            state.begun
        };
        Ok(Self {
            session: server.run(begin).await,
            server: server.clone(),
            notified,
        })
    }

    pub fn eager_reconnect(&mut self, _: bool) {}

    /// `SELECT tower_fence.lease_listen(…)`
    pub async fn execute(&mut self, call: super::super::sqlx::AssertSqlSafe<String>) -> Result<()> {
        let number = call.0.split(['(', ')']).nth(1).unwrap().parse().unwrap();
        self.change(move |session| session.listener = Some(number))
            .await
    }

    pub async fn listen(&mut self, channel: &str) -> Result<()> {
        let channel = channel.to_owned();
        self.change(|session| session.channel = Some(channel)).await
    }

    /// Returns the next notification, or `None` if the session is cut.
    pub async fn try_recv(&mut self) -> Result<Option<PgNotification>> {
        let notified = self.notified.recv().await;
        let state = self.server.0.lock().unwrap();
        let notified = notified.filter(|_| state.sessions.contains_key(&self.session));
        Ok(notified.map(PgNotification))
    }

    async fn change(&mut self, change: impl FnOnce(&mut Session) + Send + 'static) -> Result<()> {
        let session = self.session;
        let changed = self
            .server
            .run(move |state| state.sessions.get_mut(&session).map(change));
        let cut = || std::io::Error::from(std::io::ErrorKind::BrokenPipe);
        Ok(changed.await.ok_or_else(cut)?)
    }
}

impl Drop for PgListener {
    fn drop(&mut self) {
        self.server.end(self.session);
    }
}

//! Replacements, based on [`Redis`], for the modules that the queue in Redis uses: the scripts, the
//! server and its connections.

pub mod scripts {
    use super::{
        super::{
            FOR_EVER, held,
            redis::{Asked, Redis, State},
        },
        server::Server,
    };
    use crate::{
        epochs::Epoch,
        lease::{
            Held, LeaseError, Page,
            backend::{Ask, BlankCounter, Counters, End, Granted, Renewal, Reply, Seen, Waits},
        },
        token::{Resource, Token},
    };

    pub struct Scripts {
        redis: Redis,
        server: Server,
    }

    fn granted(token: i64) -> Reply {
        Reply::Granted(Granted::new(Token::new(token).unwrap(), FOR_EVER))
    }

    impl Scripts {
        pub fn new(redis: &Redis) -> Self {
            Self {
                server: Server::new(redis),
                redis: redis.clone(),
            }
        }

        pub fn server(&self) -> &Server {
            &self.server
        }

        pub fn lease_key(&self, _: &Resource) -> String {
            "the-lease".to_owned()
        }

        pub fn own_channel(&self, _: u8, issuer: i64) -> String {
            format!("issuer:{issuer}")
        }

        pub fn shared_channel(&self, _: u8) -> String {
            "everybody".to_owned()
        }

        pub fn key_prefix(&self) -> &str {
            ""
        }

        pub fn lease_key_prefix(&self) -> String {
            String::new()
        }

        pub async fn acquire(
            &self,
            _: &Resource,
            ask: &Ask,
            waits: &Waits,
            _: Seen<'_>,
        ) -> Result<Reply, LeaseError> {
            let (channel, waits) = match waits {
                Waits::Yes { listener, .. } => (self.own_channel(0, *listener), true),
                _ => (String::new(), false),
            };
            let asked = Asked {
                id: ask.lease.stored(),
                ticket: ask.ticket,
                channel,
            };
            let script = |state: &mut State| {
                if state.lease.is_none() {
                    state.end();
                }
                match &state.lease {
                    None => {
                        state.tokens += 1;
                        state.lease = Some(asked);
                        return granted(state.tokens);
                    }
                    Some(held) if held.id == asked.id => {
                        state.leave(&asked.id);
                        return granted(state.tokens);
                    }
                    Some(_) => {}
                }
                if !waits {
                    state.leave(&asked.id);
                    return Reply::Held { left: FOR_EVER };
                }
                let joined = !state.is_waiting(&asked.id);
                match state.queue.iter_mut().find(|one| one.id == asked.id) {
                    Some(place) => *place = asked,
                    None => state.queue.push_back(asked),
                }
                Reply::Queued {
                    left: FOR_EVER,
                    joined,
                }
            };
            Ok(self.redis.run(script).await)
        }

        pub async fn renew(
            &self,
            _: &Resource,
            _: &Renewal,
            _: Seen<'_>,
        ) -> Result<Reply, LeaseError> {
            Ok(Reply::Lost)
        }

        pub async fn end(&self, _: &Resource, end: &End, _: Seen<'_>) -> Result<Reply, LeaseError> {
            let script = |state: &mut State| {
                let is_it = |one: &Asked| match end {
                    End::Release(lease) => one.id == lease.stored(),
                    End::Abandon { ticket, .. } => one.ticket == *ticket,
                    End::Break(_) => false,
                };
                if matches!(end, End::Abandon { .. }) {
                    state.queue.retain(|one| !is_it(one));
                }
                if !state.lease.as_ref().is_some_and(is_it) {
                    return Reply::Lost;
                }
                state.end();
                Reply::Ended
            };
            Ok(self.redis.run(script).await)
        }

        pub async fn begin_epoch(
            &self,
            _: &Resource,
            _: &BlankCounter,
            _: Epoch,
            _: Seen<'_>,
        ) -> Result<bool, LeaseError> {
            Ok(true)
        }

        pub async fn inspect(&self, _: &Resource, _: Seen<'_>) -> Result<Option<Held>, LeaseError> {
            let script = |state: &mut State| {
                let lease = state.lease.as_ref();
                lease.map(|_| held(state.tokens, state.queue.len()))
            };
            Ok(self.redis.run(script).await)
        }

        pub async fn list(
            &self,
            _: usize,
            _: Option<&str>,
            _: Counters<'_>,
        ) -> Result<Page, LeaseError> {
            Ok(Page::default())
        }
    }
}

pub mod list {
    use crate::token::Resource;

    pub fn resource_of_key(_: &str, _: Vec<u8>) -> Option<Resource> {
        Resource::new("sku-1").ok()
    }
}

pub mod connection {
    use super::super::redis::Redis;

    pub struct Connection {
        pub(super) redis: Redis,
        pub(super) connection: u64,
    }

    impl Drop for Connection {
        fn drop(&mut self) {
            self.redis.disconnect(self.connection);
        }
    }
}

pub mod server {
    use std::time::Duration;

    use super::{
        super::{
            clock::Instant,
            redis::{PushInfo, Redis, RedisError, RedisResult},
            sync::{mpsc, watch},
        },
        connection::Connection,
    };
    use crate::lease::LeaseError;

    const COMMAND_WAIT: Duration = Duration::from_millis(50);

    pub struct Server {
        pub source: Source,
        redis: Redis,
        connected: watch::Sender<u64>,
    }

    pub struct Source;

    impl Source {
        pub fn is_cluster(&self) -> bool {
            false
        }
    }

    impl Server {
        pub fn new(redis: &Redis) -> Self {
            Self {
                source: Source,
                redis: redis.clone(),
                connected: watch::Sender::new(0),
            }
        }

        pub fn limit(&self) -> Instant {
            Instant::now() + COMMAND_WAIT
        }

        pub fn changes(&self) -> watch::Receiver<u64> {
            self.connected.subscribe()
        }

        pub async fn subscriber(
            &self,
            pushes: mpsc::UnboundedSender<PushInfo>,
        ) -> RedisResult<Connection> {
            let connection = self.redis.connect(pushes).await;
            Ok(Connection {
                redis: self.redis.clone(),
                connection,
            })
        }

        pub async fn subscribe(
            &self,
            subscriber: &Connection,
            channels: &[String],
        ) -> RedisResult<()> {
            self.redis.subscribe(subscriber.connection, channels).await
        }

        pub fn unavailable(&self, error: RedisError) -> LeaseError {
            LeaseError::unavailable(error)
        }
    }
}

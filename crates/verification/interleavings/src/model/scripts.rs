//! What the line of waiters in Redis is built on: the scripts, the server and its connections, by [`Redis`].

pub mod scripts {
    use std::time::Duration;

    use super::{
        super::redis::{Asked, Line, Redis},
        server::Server,
    };
    use crate::{
        epochs::Epoch,
        lease::{Acquire, Held, LeaseError, LeaseId, ListError, Page, Renew, stored_id::StoredId},
        redis_line::answer::{Answer, Granted},
        token::{Resource, Token},
    };

    const FOR_EVER: Duration = Duration::from_secs(1 << 30);

    pub struct Scripts {
        redis: Redis,
        server: Server,
    }

    fn granted(token: i64) -> Answer {
        Answer::Granted(Granted {
            token: Token::new(token).unwrap(),
            epoch: Epoch::FIRST,
            n: token,
        })
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

        pub fn own_channel(&self, _: u8, issuer: &str) -> String {
            format!("issuer:{issuer}")
        }

        pub fn shared_channel(&self, _: u8) -> String {
            "everybody".to_owned()
        }

        pub async fn acquire(
            &self,
            _: &Resource,
            request: &Acquire,
            ticket: u64,
            wait: Duration,
            channel: &str,
            _: usize,
        ) -> Result<Answer, LeaseError> {
            let asked = Asked {
                id: StoredId::of(&request.lease_id).as_str().to_owned(),
                ticket,
                channel: channel.to_owned(),
            };
            let script = |line: &mut Line| {
                if line.lease.is_none() {
                    line.end();
                }
                match &line.lease {
                    None => {
                        line.tokens += 1;
                        line.lease = Some(asked);
                        return granted(line.tokens);
                    }
                    Some(held) if held.id == asked.id => {
                        line.leave(&asked.id);
                        return granted(line.tokens);
                    }
                    Some(_) => {}
                }
                if wait.is_zero() {
                    line.leave(&asked.id);
                    return Answer::Held { left: FOR_EVER };
                }
                match line.line.iter_mut().find(|one| one.id == asked.id) {
                    Some(place) => *place = asked,
                    None => line.line.push_back(asked),
                }
                Answer::Queued { left: FOR_EVER }
            };
            Ok(self.redis.run(script).await)
        }

        pub async fn renew(
            &self,
            resource: &Resource,
            _: &LeaseId,
            _: Renew,
        ) -> Result<Answer, LeaseError> {
            Ok(Answer::Lost)
        }

        pub async fn abandon(
            &self,
            _: &Resource,
            id: &StoredId,
            ticket: u64,
        ) -> Result<bool, LeaseError> {
            let script = |line: &mut Line| {
                let is_it = |one: &Asked| one.id == id.as_str() && one.ticket == ticket;
                line.line.retain(|one| !is_it(one));
                let held = line.lease.as_ref().is_some_and(is_it);
                if held {
                    line.end();
                }
                held
            };
            Ok(self.redis.run(script).await)
        }

        pub async fn release(&self, _: &Resource, id: &LeaseId) -> Result<bool, LeaseError> {
            let id = StoredId::of(id);
            let script = |line: &mut Line| {
                let held = line.lease.as_ref().is_some_and(|one| one.id == id.as_str());
                if held {
                    line.end();
                }
                held
            };
            Ok(self.redis.run(script).await)
        }

        pub async fn break_lease(
            &self,
            _: &Resource,
            _: Option<Token>,
        ) -> Result<bool, LeaseError> {
            Ok(false)
        }

        pub async fn tick(
            &self,
            _: &Resource,
            waiter: Option<&StoredId>,
        ) -> Result<Answer, LeaseError> {
            let script = |line: &mut Line| {
                if line.lease.is_none() {
                    line.end();
                }
                match line.lease {
                    None => Answer::Free,
                    Some(_) => Answer::Watched {
                        left: FOR_EVER,
                        in_line: waiter.is_some_and(|id| line.is_waiting(id.as_str())),
                    },
                }
            };
            Ok(self.redis.run(script).await)
        }

        pub async fn inspect(&self, _: &Resource) -> Result<Option<Held>, LeaseError> {
            let script = |line: &mut Line| {
                line.lease.as_ref().map(|_| Held {
                    token: Token::new(line.tokens).unwrap(),
                    owner: None,
                    ttl: FOR_EVER,
                    waiters: line.line.len() as u64,
                })
            };
            Ok(self.redis.run(script).await)
        }

        pub async fn list(&self, _: usize, _: Option<&str>) -> Result<Page, ListError> {
            Ok(Page::default())
        }

        pub fn doubt_epoch(&self, _: &Resource) {}
    }
}

pub mod connection {
    use super::super::redis::Redis;

    pub struct Subscriber {
        pub(super) redis: Redis,
        pub(super) connection: u64,
    }

    impl Subscriber {
        pub fn has_many_servers(&self) -> bool {
            false
        }
    }

    impl Drop for Subscriber {
        fn drop(&mut self) {
            self.redis.disconnect(self.connection);
        }
    }
}

pub mod server {
    use std::{io, time::Duration};

    use super::{
        super::{
            clock::Instant,
            redis::{PushInfo, Redis, RedisError, RedisResult},
            sync::{mpsc, watch},
            tokio::time::timeout_at,
        },
        connection::Subscriber,
    };
    use crate::lease::LeaseError;

    const COMMAND_WAIT: Duration = Duration::from_millis(50);

    pub struct Server {
        redis: Redis,
        connected: watch::Sender<u64>,
    }

    impl Server {
        pub fn new(redis: &Redis) -> Self {
            Self {
                redis: redis.clone(),
                connected: watch::Sender::new(0),
            }
        }

        pub fn command_wait(&self) -> Duration {
            COMMAND_WAIT
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
        ) -> RedisResult<Subscriber> {
            let connection = self.redis.connect(pushes).await;
            Ok(Subscriber {
                redis: self.redis.clone(),
                connection,
            })
        }

        pub async fn subscribe(
            &self,
            subscriber: &Subscriber,
            channels: [String; 2],
        ) -> RedisResult<()> {
            self.redis.subscribe(subscriber.connection, channels).await
        }

        pub fn unavailable(&self, error: RedisError) -> LeaseError {
            LeaseError::unavailable(error)
        }
    }

    pub async fn in_time<T>(
        until: Instant,
        command: impl Future<Output = RedisResult<T>>,
    ) -> RedisResult<T> {
        let late = |_| Err(io::Error::from(io::ErrorKind::TimedOut).into());
        timeout_at(until, command).await.unwrap_or_else(late)
    }
}

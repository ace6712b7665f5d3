//! A TCP proxy between a client and its server. A test cuts or silences all its connections with a
//! [`Link`], or sets a rule that returns a [`Passage`] for each message.

use std::{
    net::SocketAddr,
    sync::{
        Arc, Mutex,
        atomic::{
            AtomicU64,
            Ordering::{Relaxed, SeqCst},
        },
    },
    time::Duration,
};

use reqwest::Url;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::watch,
    task::JoinHandle,
    time::sleep,
};

/// The state of all connections of a proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Link {
    /// Forwards everything.
    Whole,
    /// Closes all connections, and each new one.
    Cut,
    /// Keeps connections open, and holds back everything until the state changes.
    Silent,
    /// Forwards requests, and closes the connection instead of forwarding the answer.
    NoAnswer,
}

/// The sender of a message. A message is the result of one read from the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sender {
    Client,
    Server,
}

/// How the proxy handles a message.
#[derive(Clone, Debug)]
pub enum Passage {
    /// Forwards the message.
    Whole,
    /// Forwards another message instead.
    Instead(Vec<u8>),
    /// Holds back the message and all later ones while the value is true, and then forwards them.
    Held(watch::Receiver<bool>),
    /// Discards the message, and keeps the connection open.
    Dropped,
    /// Forwards this number of bytes of the message, and then closes the connection.
    CutAfter(usize),
    /// Forwards the message, and closes the connection after this time.
    CutLater(Duration),
    /// Holds back the message until the value is true, even if its sender disconnects first.
    Until(watch::Receiver<bool>),
}

impl Passage {
    /// Returns this passage if it applies, and otherwise [`Passage::Whole`].
    pub fn when(self, applies: bool) -> Self {
        if applies { self } else { Self::Whole }
    }
}

/// Whether a message contains this text.
pub fn contains(message: &[u8], text: &str) -> bool {
    let mut parts = message.windows(text.len());
    parts.any(|part| part == text.as_bytes())
}

/// The rule for the messages of one connection.
type Rule = Box<dyn FnMut(Sender, &[u8]) -> Passage + Send>;

pub struct Proxy {
    pub addr: SocketAddr,
    server: watch::Sender<SocketAddr>,
    link: watch::Sender<Link>,
    delay: watch::Sender<Duration>,
    connections: Arc<AtomicU64>,
    task: JoinHandle<()>,
}

impl Proxy {
    /// Starts a proxy that forwards everything.
    pub async fn to(server: SocketAddr) -> Self {
        Self::delaying(server, Duration::ZERO).await
    }

    /// Starts a proxy that delays each message, in both directions.
    pub async fn delaying(server: SocketAddr, delay: Duration) -> Self {
        let all_pass = || |_: Sender, _: &[u8]| Passage::Whole;
        Self::start(server, delay, all_pass).await
    }

    /// Starts a proxy that applies a rule to each message. Each connection gets a copy of the rule.
    pub async fn judging(
        server: SocketAddr,
        rule: impl FnMut(Sender, &[u8]) -> Passage + Clone + Send + Sync + 'static,
    ) -> Self {
        Self::judging_each(server, move || rule.clone()).await
    }

    /// Like [`judging`](Self::judging), with a function that creates the rule of each connection.
    pub async fn judging_each<R>(
        server: SocketAddr,
        new_rule: impl Fn() -> R + Send + Sync + 'static,
    ) -> Self
    where
        R: FnMut(Sender, &[u8]) -> Passage + Send + 'static,
    {
        Self::start(server, Duration::ZERO, new_rule).await
    }

    /// Starts a proxy that counts round trips. A round trip begins when the client sends after the
    /// server has sent.
    pub async fn counting(server: SocketAddr) -> (Self, Arc<AtomicU64>) {
        let trips = Arc::<AtomicU64>::default();
        let counter = trips.clone();
        let mut last = Sender::Server;
        let proxy = Self::judging(server, move |sender, _| {
            if sender == Sender::Client && last == Sender::Server {
                counter.fetch_add(1, SeqCst);
            }
            last = sender;
            Passage::Whole
        });
        (proxy.await, trips)
    }

    /// Starts a proxy that answers each request with a redirect to the same path below this URL.
    pub async fn redirecting(server: SocketAddr, url: &str) -> Self {
        let url = url.trim_end_matches('/').to_owned();
        let mut path = String::new();
        Self::judging(server, move |sender, message| {
            let text = String::from_utf8_lossy(message);
            match (sender, text.split(' ').nth(1)) {
                (Sender::Client, Some(word)) => path = word.to_owned(),
                (Sender::Server, _) if text.starts_with("HTTP/1.1 ") => {
                    let answer = format!(
                        "HTTP/1.1 307 Temporary Redirect\r\nlocation: {url}{path}\r\n\
                             content-length: 0\r\n\r\n"
                    );
                    return Passage::Instead(answer.into_bytes());
                }
                (Sender::Server, _) => return Passage::Dropped,
                (Sender::Client, None) => {}
            }
            Passage::Whole
        })
        .await
    }

    async fn start<R>(
        server: SocketAddr,
        delay: Duration,
        new_rule: impl Fn() -> R + Send + Sync + 'static,
    ) -> Self
    where
        R: FnMut(Sender, &[u8]) -> Passage + Send + 'static,
    {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let (link, watched) = watch::channel(Link::Whole);
        let (delay, delayed) = watch::channel(delay);
        let (server, leads_to) = watch::channel(server);
        let connections = Arc::<AtomicU64>::default();
        let counting = connections.clone();
        let task = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                counting.fetch_add(1, Relaxed);
                let connection = Connection {
                    link: watched.clone(),
                    delay: delayed.clone(),
                    rule: Mutex::new(Box::new(new_rule())),
                };
                let leads_to = leads_to.clone();
                tokio::spawn(async move { connection.run(client, leads_to).await });
            }
        });
        Self {
            addr,
            server,
            link,
            delay,
            connections,
            task,
        }
    }

    pub fn set(&self, link: Link) {
        self.link.send_replace(link);
    }

    /// Delays each message from now on, in both directions.
    pub fn slow_down(&self, delay: Duration) {
        self.delay.send_replace(delay);
    }

    /// Forwards everything to another server from now on, and closes the connections to the
    /// previous server.
    pub fn switch_to(&self, server: SocketAddr) {
        self.server.send_replace(server);
        self.set(Link::Whole);
    }

    /// Forwards new connections to another server from now on. The open connections stay as they
    /// are, as after a change of a DNS record.
    pub fn switch_new_to(&self, server: SocketAddr) {
        self.server.send_if_modified(|current| {
            *current = server;
            // Do not notify the open connections.
            false
        });
    }

    /// Returns the number of connections that were opened.
    pub fn connections(&self) -> u64 {
        self.connections.load(Relaxed)
    }

    /// Replaces the address of the server in a URL with that of the proxy.
    pub fn url(&self, url: &str) -> String {
        let mut url = Url::parse(url).unwrap();
        url.set_ip_host(self.addr.ip()).unwrap();
        url.set_port(Some(self.addr.port())).unwrap();
        url.into()
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.task.abort();
    }
}

struct Connection {
    link: watch::Receiver<Link>,
    delay: watch::Receiver<Duration>,
    rule: Mutex<Rule>,
}

impl Connection {
    async fn run(&self, client: TcpStream, mut leads_to: watch::Receiver<SocketAddr>) {
        let server = *leads_to.borrow_and_update();
        let Ok(server) = TcpStream::connect(server).await else {
            return;
        };
        let mut link = self.link.clone();
        let (from_client, to_client) = client.into_split();
        let (from_server, to_server) = server.into_split();
        tokio::select! {
            () = self.pass(Sender::Client, from_client, to_server) => {}
            () = self.pass(Sender::Server, from_server, to_client) => {}
            _ = link.wait_for(|link| *link == Link::Cut) => {}
            _ = leads_to.changed() => {}
        }
    }

    /// Forwards the messages of one side until the connection has to be closed.
    async fn pass(
        &self,
        sender: Sender,
        mut from: impl AsyncReadExt + Unpin,
        mut to: impl AsyncWriteExt + Unpin,
    ) {
        let mut link = self.link.clone();
        let mut buffer = vec![0; 64 * 1024];
        while let Ok(length @ 1..) = from.read(&mut buffer).await {
            let passes = match link.wait_for(|link| *link != Link::Silent).await {
                Ok(link) => match *link {
                    Link::NoAnswer => sender == Sender::Client,
                    link => link == Link::Whole,
                },
                // The `Sender` of the watch channel was dropped, because the test has ended.
                Err(_) => false,
            };
            if !passes {
                return;
            }
            let delay = *self.delay.borrow();
            if !delay.is_zero() {
                sleep(delay).await;
            }
            let message = &buffer[..length];
            let mut passage = (self.rule.lock().unwrap())(sender, message);
            if let Passage::Held(held) = &mut passage {
                let _ = held.wait_for(|held| !held).await;
            }
            if let Passage::Until(passes) = &mut passage
                && passes.wait_for(|passes| *passes).await.is_err()
            {
                return;
            }
            let part = match &passage {
                Passage::Whole | Passage::Held(_) | Passage::Until(_) | Passage::CutLater(_) => {
                    message
                }
                Passage::Instead(other) => other,
                Passage::Dropped => continue,
                Passage::CutAfter(count) => &message[..*count],
            };
            if to.write_all(part).await.is_err() {
                return;
            }
            match passage {
                Passage::CutAfter(_) => return,
                Passage::CutLater(later) => return sleep(later).await,
                Passage::Whole
                | Passage::Instead(_)
                | Passage::Held(_)
                | Passage::Until(_)
                | Passage::Dropped => {}
            }
        }
    }
}

//! A TCP proxy whose connections can be cut, and can fall silent.

use std::{net::SocketAddr, time::Duration};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::watch,
    task::JoinHandle,
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Link {
    /// Passes everything on.
    Whole,
    /// Closes connections, and those that are opened.
    Cut,
    /// Keeps connections open and passes nothing on.
    Silent,
    /// Passes requests on; closes the connection instead of the answer.
    NoAnswer,
}

pub struct Proxy {
    pub addr: SocketAddr,
    link: watch::Sender<Link>,
    task: JoinHandle<()>,
}

impl Proxy {
    pub async fn to(server: SocketAddr) -> Self {
        Self::delaying(server, Duration::ZERO).await
    }

    /// One that takes so long to pass each message on, in either direction.
    pub async fn delaying(server: SocketAddr, delay: Duration) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let (link, watched) = watch::channel(Link::Whole);
        let task = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                tokio::spawn(pass(client, server, watched.clone(), delay));
            }
        });
        Self { addr, link, task }
    }

    pub fn set(&self, link: Link) {
        self.link.send_replace(link);
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn pass(client: TcpStream, server: SocketAddr, link: watch::Receiver<Link>, delay: Duration) {
    let mut cut = link.clone();
    let Ok(server) = TcpStream::connect(server).await else {
        return;
    };
    let (from_client, to_client) = client.into_split();
    let (from_server, to_server) = server.into_split();
    tokio::select! {
        () = one_way(from_client, to_server, link.clone(), false, delay) => {}
        () = one_way(from_server, to_client, link, true, delay) => {}
        _ = cut.wait_for(|link| *link == Link::Cut) => {}
    }
}

async fn one_way(
    mut from: impl AsyncReadExt + Unpin,
    mut to: impl AsyncWriteExt + Unpin,
    mut link: watch::Receiver<Link>,
    answers: bool,
    delay: Duration,
) {
    let mut buffer = vec![0; 64 * 1024];
    while let Ok(length @ 1..) = from.read(&mut buffer).await {
        let passes = match link.wait_for(|link| *link != Link::Silent).await {
            Ok(link) => *link == Link::Whole || *link == Link::NoAnswer && !answers,
            Err(_) => false,
        };
        if !passes {
            return;
        }
        if !delay.is_zero() {
            tokio::time::sleep(delay).await;
        }
        if to.write_all(&buffer[..length]).await.is_err() {
            return;
        }
    }
}

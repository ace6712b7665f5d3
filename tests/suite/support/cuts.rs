//! Connections that are cut on purpose.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};

/// Where a connection of one request was cut: after half of the request, while the request was
/// worked on, before the answer, or in it.
#[derive(Default)]
pub struct Cuts {
    pub request: AtomicU64,
    pub work: AtomicU64,
    pub before_answer: AtomicU64,
    pub answer: AtomicU64,
}

impl Cuts {
    /// How often each happened.
    pub fn counts(&self) -> [u64; 4] {
        [&self.request, &self.work, &self.before_answer, &self.answer].map(|cut| cut.load(Relaxed))
    }
}

/// Passes on one request per connection; cuts four of five connections, in each place as often.
pub async fn cut_requests(to: SocketAddr) -> (SocketAddr, Arc<Cuts>) {
    let cuts = Arc::new(Cuts::default());
    let counting = cuts.clone();
    let addr = accept(to, move |client, server| {
        cut_one(client, server, counting.clone())
    })
    .await;
    (addr, cuts)
}

async fn cut_one(mut client: TcpStream, mut server: TcpStream, cuts: Arc<Cuts>) {
    let place = rand::random_range(0..5);
    let mut buffer = vec![0; 64 * 1024];
    let Ok(length @ 1..) = client.read(&mut buffer).await else {
        return;
    };
    let half = |length: usize| rand::random_range(1..length);
    let length = if place == 0 { half(length) } else { length };
    if server.write_all(&buffer[..length]).await.is_err() {
        return;
    }
    let cut = match place {
        0 => &cuts.request,
        1 => {
            tokio::time::sleep(Duration::from_micros(rand::random_range(0..10_000))).await;
            &cuts.work
        }
        _ => {
            let Ok(length @ 2..) = server.read(&mut buffer).await else {
                return;
            };
            let (length, cut) = match place {
                2 => (0, &cuts.before_answer),
                3 => (half(length), &cuts.answer),
                _ => {
                    let _ = client.write_all(&buffer[..length]).await;
                    let _ = tokio::io::copy_bidirectional(&mut client, &mut server).await;
                    return;
                }
            };
            let _ = client.write_all(&buffer[..length]).await;
            cut
        }
    };
    cut.fetch_add(1, Relaxed);
}

/// Passes on messages in both directions, and cuts the connection at one of `one_in`.
pub async fn cut_messages(to: SocketAddr, one_in: u32) -> (SocketAddr, Arc<AtomicU64>) {
    let cuts = Arc::new(AtomicU64::new(0));
    let counting = cuts.clone();
    let addr = accept(to, move |mut client, mut server| {
        let cuts = counting.clone();
        async move {
            let (mut one, mut other) = (vec![0; 64 * 1024], vec![0; 64 * 1024]);
            loop {
                let (length, answer) = tokio::select! {
                    read = client.read(&mut one) => (read, false),
                    read = server.read(&mut other) => (read, true),
                };
                let Ok(length @ 1..) = length else { return };
                if rand::random_ratio(1, one_in) {
                    cuts.fetch_add(1, Relaxed);
                    return;
                }
                let passed = if answer {
                    client.write_all(&other[..length]).await
                } else {
                    server.write_all(&one[..length]).await
                };
                if passed.is_err() {
                    return;
                }
            }
        }
    })
    .await;
    (addr, cuts)
}

async fn accept<F: Future<Output = ()> + Send + 'static>(
    to: SocketAddr,
    pass: impl Fn(TcpStream, TcpStream) -> F + Send + 'static,
) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            if let Ok(server) = TcpStream::connect(to).await {
                tokio::spawn(pass(client, server));
            }
        }
    });
    addr
}

//! Replacements for the channels and locks of tokio, with a step before each operation. They need
//! no tokio runtime.

use std::sync::Arc;

use tokio::sync as real;
pub use tokio::sync::{AcquireError, MutexGuard, TryAcquireError};

use super::step;

#[derive(Debug, Default)]
pub struct Notify(real::Notify);

impl Notify {
    pub fn notify_one(&self) {
        step();
        self.0.notify_one();
    }

    pub async fn notified(&self) {
        step();
        self.0.notified().await;
    }
}

#[derive(Debug, Default)]
pub struct Mutex<T>(real::Mutex<T>);

impl<T> Mutex<T> {
    pub fn new(value: T) -> Self {
        Self(real::Mutex::new(value))
    }

    pub async fn lock(&self) -> MutexGuard<'_, T> {
        step();
        self.0.lock().await
    }
}

#[derive(Debug)]
pub struct Semaphore(Arc<real::Semaphore>);

/// A permit that owns a reference to its semaphore, like `OwnedSemaphorePermit` of tokio.
#[derive(Debug)]
pub struct OwnedSemaphorePermit(Option<real::OwnedSemaphorePermit>, Arc<Semaphore>);

impl Semaphore {
    pub const MAX_PERMITS: usize = real::Semaphore::MAX_PERMITS;

    pub fn new(permits: usize) -> Self {
        Self(Arc::new(real::Semaphore::new(permits)))
    }

    pub fn available_permits(&self) -> usize {
        step();
        self.0.available_permits()
    }

    pub fn try_acquire_owned(self: Arc<Self>) -> Result<OwnedSemaphorePermit, TryAcquireError> {
        step();
        let permit = Arc::clone(&self.0).try_acquire_owned()?;
        Ok(OwnedSemaphorePermit(Some(permit), self))
    }

    pub async fn acquire_owned(self: Arc<Self>) -> Result<OwnedSemaphorePermit, AcquireError> {
        step();
        let permit = Arc::clone(&self.0).acquire_owned().await?;
        Ok(OwnedSemaphorePermit(Some(permit), self))
    }
}

impl Drop for OwnedSemaphorePermit {
    fn drop(&mut self) {
        step();
        self.0 = None;
        step();
    }
}

/// A replacement for the `OnceLock` of `std`. Tasks can wait while another task initializes it.
#[derive(Debug)]
pub struct OnceLock<T> {
    beginning: shuttle::sync::Mutex<()>,
    value: std::sync::OnceLock<T>,
}

impl<T> Default for OnceLock<T> {
    fn default() -> Self {
        Self {
            beginning: shuttle::sync::Mutex::new(()),
            value: std::sync::OnceLock::new(),
        }
    }
}

impl<T> OnceLock<T> {
    pub fn get(&self) -> Option<&T> {
        step();
        self.value.get()
    }

    pub fn set(&self, value: T) -> Result<(), T> {
        step();
        self.value.set(value)
    }

    pub fn get_or_init(&self, value: impl FnOnce() -> T) -> &T {
        let _beginning = self.beginning.lock().unwrap();
        self.value.get_or_init(value)
    }
}

pub mod mpsc {
    use super::{real::mpsc as real, step};

    pub use real::error;

    #[derive(Debug)]
    pub struct UnboundedSender<T>(real::UnboundedSender<T>);

    #[derive(Debug)]
    pub struct UnboundedReceiver<T>(real::UnboundedReceiver<T>);

    pub fn unbounded_channel<T>() -> (UnboundedSender<T>, UnboundedReceiver<T>) {
        let (sender, receiver) = real::unbounded_channel();
        (UnboundedSender(sender), UnboundedReceiver(receiver))
    }

    impl<T> UnboundedSender<T> {
        pub fn send(&self, value: T) -> Result<(), error::SendError<T>> {
            step();
            self.send_at_once(value)
        }

        /// Sends without a step.
        pub fn send_at_once(&self, value: T) -> Result<(), error::SendError<T>> {
            self.0.send(value)
        }
    }

    impl<T> Clone for UnboundedSender<T> {
        fn clone(&self) -> Self {
            Self(self.0.clone())
        }
    }

    impl<T> UnboundedReceiver<T> {
        pub async fn recv(&mut self) -> Option<T> {
            step();
            self.0.recv().await
        }

        pub fn try_recv(&mut self) -> Result<T, error::TryRecvError> {
            step();
            self.0.try_recv()
        }
    }
}

pub mod oneshot {
    use std::{
        pin::Pin,
        task::{Context, Poll},
    };

    use super::{real::oneshot as real, step};

    #[derive(Debug)]
    pub struct Sender<T>(real::Sender<T>);

    #[derive(Debug)]
    pub struct Receiver<T>(real::Receiver<T>);

    pub fn channel<T>() -> (Sender<T>, Receiver<T>) {
        let (sender, receiver) = real::channel();
        (Sender(sender), Receiver(receiver))
    }

    impl<T> Sender<T> {
        pub fn send(self, value: T) -> Result<(), T> {
            step();
            self.0.send(value)
        }

        pub fn is_closed(&self) -> bool {
            step();
            self.0.is_closed()
        }
    }

    impl<T> Future for Receiver<T> {
        type Output = Result<T, real::error::RecvError>;

        fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
            step();
            Pin::new(&mut self.0).poll(context)
        }
    }

    impl<T> Drop for Receiver<T> {
        fn drop(&mut self) {
            step();
        }
    }
}

pub mod watch {
    use super::{real::watch as real, step};

    #[derive(Debug)]
    pub struct Sender<T>(real::Sender<T>);

    #[derive(Debug, Clone)]
    pub struct Receiver<T>(real::Receiver<T>);

    impl<T> Sender<T> {
        pub fn new(value: T) -> Self {
            Self(real::Sender::new(value))
        }

        pub fn borrow(&self) -> real::Ref<'_, T> {
            step();
            self.0.borrow()
        }

        pub fn send_modify(&self, modify: impl FnOnce(&mut T)) {
            step();
            self.0.send_modify(modify);
        }

        pub fn send_if_modified(&self, modify: impl FnOnce(&mut T) -> bool) -> bool {
            step();
            self.0.send_if_modified(modify)
        }

        pub fn send_replace(&self, value: T) -> T {
            step();
            self.0.send_replace(value)
        }

        pub fn subscribe(&self) -> Receiver<T> {
            step();
            Receiver(self.0.subscribe())
        }
    }

    impl<T> Receiver<T> {
        pub fn borrow_and_update(&mut self) -> real::Ref<'_, T> {
            step();
            self.0.borrow_and_update()
        }

        pub async fn wait_for(
            &mut self,
            is_there: impl FnMut(&T) -> bool,
        ) -> Result<real::Ref<'_, T>, real::error::RecvError> {
            step();
            self.0.wait_for(is_there).await
        }

        pub async fn changed(&mut self) -> Result<(), real::error::RecvError> {
            step();
            self.0.changed().await
        }
    }
}

//! A future that an actor polls together with its inbox.

use std::fmt;

use tokio_util::sync::ReusableBoxFuture;

/// At most one running future with a result of type `T`.
pub(super) struct Background<T>(Option<ReusableBoxFuture<'static, T>>);

impl<T> Default for Background<T> {
    fn default() -> Self {
        Self(None)
    }
}

impl<T: 'static> fmt::Debug for Background<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Background").field(&self.is_running()).finish()
    }
}

impl<T: 'static> Background<T> {
    /// Returns whether a future runs.
    pub(super) fn is_running(&self) -> bool {
        self.0.is_some()
    }

    /// Starts a future. Drops the future that runs, if any.
    pub(super) fn start(&mut self, future: impl Future<Output = T> + Send + 'static) {
        self.0 = Some(ReusableBoxFuture::new(future));
    }

    /// Drops the future that runs.
    pub(super) fn stop(&mut self) {
        self.0 = None;
    }

    /// Waits for the result. Never returns if no future runs. If the caller stops waiting, the next call continues
    /// with the same future.
    pub(super) async fn finished(&mut self) -> T {
        let Some(future) = &mut self.0 else { return std::future::pending().await };
        let result = future.await;
        self.0 = None;
        result
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;
    use tokio::sync::oneshot;

    use super::*;

    #[test]
    fn result_is_kept_if_the_wait_is_interrupted() {
        let mut background = Background::default();
        assert!(!background.is_running() && background.finished().now_or_never().is_none());
        let (done, result) = oneshot::channel();
        background.start(async move { result.await.unwrap_or(0) });
        assert!(background.finished().now_or_never().is_none(), "the future still runs");
        done.send(7).unwrap();
        assert_eq!(background.finished().now_or_never(), Some(7));
        assert!(!background.is_running());
    }

    #[test]
    fn replaced_and_stopped_futures_are_dropped() {
        let mut background = Background::default();
        let (first, lost) = oneshot::channel::<()>();
        background.start(async move { lost.await.is_ok() });
        background.start(std::future::pending());
        assert!(first.is_closed() && background.is_running());
        background.stop();
        assert!(!background.is_running() && background.finished().now_or_never().is_none());
    }
}

//! Subtasks: tasks whose result another task awaits. A panic in a subtask continues in the task that awaits it, so gpushd
//! reports the panic, and does not take it for a missing result.

use std::panic::resume_unwind;

use tokio::task::{JoinError, JoinSet};

/// Runs `work` on a blocking thread. Returns `None` if the runtime ends before `work` begins.
///
/// # Panics
/// If `work` panics.
#[expect(clippy::disallowed_methods, reason = "the panic continues in the caller")]
pub async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    output(tokio::task::spawn_blocking(work).await)
}

/// Waits until one of the subtasks ends. Returns `None` if there is none.
///
/// # Panics
/// If the subtask panicked.
#[expect(clippy::disallowed_methods, reason = "the panic continues in the caller")]
pub async fn next<T: 'static>(subtasks: &mut JoinSet<T>) -> Option<T> {
    loop {
        let ended = subtasks.join_next().await?;
        if let Some(value) = output(ended) {
            return Some(value);
        }
    }
}

/// Returns the value of a subtask; `None` if the subtask was aborted.
///
/// # Panics
/// If the subtask panicked.
pub fn output<T>(ended: Result<T, JoinError>) -> Option<T> {
    match ended {
        Ok(value) => Some(value),
        Err(error) => match error.try_into_panic() {
            Ok(panic) => resume_unwind(panic),
            Err(_aborted) => None,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn panic_in_a_subtask_continues_in_its_parent() {
        let of_thread = tokio::spawn(blocking(|| panic!("on purpose"))).await.map(|_: Option<()>| ());
        assert!(of_thread.unwrap_err().is_panic());
        let of_set = tokio::spawn(async {
            let mut subtasks = JoinSet::new();
            subtasks.spawn(async { panic!("on purpose") });
            next::<()>(&mut subtasks).await
        });
        assert!(of_set.await.unwrap_err().is_panic());
    }

    #[tokio::test]
    async fn aborted_subtask_has_no_output() {
        let mut subtasks = JoinSet::new();
        subtasks.spawn(std::future::pending::<u8>()).abort();
        subtasks.spawn(async { 7 });
        assert_eq!((next(&mut subtasks).await, next(&mut subtasks).await), (Some(7), None));
        assert_eq!(blocking(|| 7).await, Some(7));
    }
}

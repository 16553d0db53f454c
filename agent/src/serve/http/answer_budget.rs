//! Limits the memory of answers that clients have not read yet.
//!
//! A client can request an answer and not read it. The answer then stays in memory until the client reads it, or until
//! gpushd closes the connection. So the answers of one account may take [`PER_ACCOUNT`] KiB in all, and those of all
//! users [`IN_ALL`] KiB. Administrators have a budget of their own.
//!
//! hyper takes the next piece of an answer only when its write buffer has room. So an answer is sent in pieces of
//! [`PIECE`] bytes.

use std::{
    collections::HashMap,
    convert::Infallible,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use axum::{
    body::{Body, Bytes},
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use gpush_api::{ApiError, Code};
use gpush_host::accounts::Account;
use gpush_locked::Locked;
use hyper::body::{Frame, SizeHint};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::failure::Failure;
use crate::requests::caller::Caller;

/// Memory in KiB of the unread answers of one account, and of all users.
const PER_ACCOUNT: usize = 4 << 10;
const IN_ALL: usize = 32 << 10;

/// Size of a piece of an answer, in bytes.
const PIECE: usize = 16 << 10;

/// The memory that unread answers may take. A handle, cheap to clone.
#[derive(Debug, Clone)]
pub(super) struct AnswerBudget(Arc<Budgets>);

#[derive(Debug)]
struct Budgets {
    users: Arc<Semaphore>,
    administrators: Arc<Semaphore>,
    /// For each account with unread answers, its budget.
    accounts: Locked<HashMap<Account, Arc<Semaphore>>>,
}

/// An answer in memory, and its part of the budgets.
struct Unread {
    json: Bytes,
    _of_account: Option<OwnedSemaphorePermit>,
    _of_all: OwnedSemaphorePermit,
}

impl AsRef<[u8]> for Unread {
    fn as_ref(&self) -> &[u8] {
        &self.json
    }
}

impl AnswerBudget {
    pub(super) fn new() -> Self {
        Self(Arc::new(Budgets {
            users: Arc::new(Semaphore::new(IN_ALL)),
            administrators: Arc::new(Semaphore::new(IN_ALL)),
            accounts: Locked::default(),
        }))
    }

    /// Takes the memory of an answer from the budgets. The memory is returned when the answer was sent, or when the
    /// connection was closed.
    ///
    /// # Errors
    /// If too many answers are unread.
    pub(super) fn take(&self, caller: &Caller, json: Bytes) -> Result<Bytes, Failure> {
        let kib = u32::try_from(json.len().div_ceil(1024)).unwrap_or(u32::MAX);
        let of = |budget: Arc<Semaphore>, who: &dyn Fn() -> String| {
            budget.try_acquire_many_owned(kib).map_err(|_| too_many_unread(&who()))
        };
        let account = caller.counted_account();
        let is_admin = caller.viewer.is_admin();
        let of_account = match is_admin {
            true => None,
            false => Some(of(self.account(account), &|| account.to_string())?),
        };
        let all = if is_admin { &self.0.administrators } else { &self.0.users };
        let of_all = of(Arc::clone(all), &|| "this host".to_owned())?;
        Ok(Bytes::from_owner(Unread { json, _of_account: of_account, _of_all: of_all }))
    }

    fn account(&self, account: Account) -> Arc<Semaphore> {
        let mut accounts = self.0.accounts.lock();
        // Remove the accounts without unread answers.
        accounts.retain(|_, budget| Arc::strong_count(budget) > 1);
        Arc::clone(accounts.entry(account).or_insert_with(|| Arc::new(Semaphore::new(PER_ACCOUNT))))
    }
}

fn too_many_unread(who: &str) -> Failure {
    ApiError::new(Code::Unavailable, format!("gpushd holds too many answers that clients of {who} have not read"))
        .hint("read the answers of earlier requests, or close their connections, then try again")
        .retryable()
        .into()
}

/// Content type of JSON.
pub(super) const JSON: HeaderValue = HeaderValue::from_static("application/json");

/// Content type of CSV.
pub(super) const CSV: HeaderValue = HeaderValue::from_static("text/csv; charset=utf-8; header=present");

/// Creates a response that is sent in pieces.
pub(super) fn response(status: StatusCode, content_type: HeaderValue, content: Bytes) -> Response {
    (status, [(header::CONTENT_TYPE, content_type)], Body::new(Pieces(content))).into_response()
}

/// The rest of an answer.
struct Pieces(Bytes);

impl hyper::body::Body for Pieces {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if self.0.is_empty() {
            return Poll::Ready(None);
        }
        let length = self.0.len().min(PIECE);
        Poll::Ready(Some(Ok(Frame::data(self.0.split_to(length)))))
    }

    fn is_end_stream(&self) -> bool {
        self.0.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.0.len() as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::requests::caller::tests::caller_of;

    /// Fault: 30 clients of one user that did not read their answers took 1,320 MiB.
    #[test]
    fn unread_answers_of_an_account_are_limited() {
        let budget = AnswerBudget::new();
        let answer = || Bytes::from(vec![b' '; 1 << 20]);
        let take = |uid| budget.take(&caller_of(uid), answer());
        let unread: Vec<Bytes> = std::iter::from_fn(|| take(1000).ok()).collect();
        assert_eq!(unread.len(), 4);
        let others: Vec<Bytes> = (0..100).filter_map(|n| take(2000 + n).ok()).collect();
        assert_eq!(others.len(), 28, "32 MiB in all");
        assert_eq!(take(1001).unwrap_err().into_response().status(), StatusCode::SERVICE_UNAVAILABLE);
        assert!(take(0).is_ok(), "administrators have their own");
        // A part of an answer that is still in a write buffer keeps the whole answer in memory.
        let part = unread[0].slice(..10);
        drop(unread);
        let again: Vec<Bytes> = std::iter::from_fn(|| take(1000).ok()).collect();
        assert_eq!(again.len(), 3);
        drop((part, again, others));
        assert!(take(1000).is_ok());
        assert_eq!(budget.0.accounts.lock().len(), 1);
    }
}

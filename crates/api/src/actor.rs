//! Users who make requests.

use serde::{Deserialize, Serialize};

/// The user who made a request, identified by socket peer credentials.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Actor {
    /// User id.
    pub uid: u32,
    /// User name; absent if the uid has no name, and for root of a container.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Process id of the caller at the time of the request; absent if the caller of this request may not see it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
}

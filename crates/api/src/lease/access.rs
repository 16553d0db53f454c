//! The users who may lease the GPUs of a config rule.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The users who may lease the GPUs of a rule: the named users, and the members of the named groups.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct LeaseAccess {
    /// User names.
    #[serde(default, rename = "user_names", skip_serializing_if = "Vec::is_empty")]
    pub users: Vec<String>,
    /// Group names.
    #[serde(default, rename = "group_names", skip_serializing_if = "Vec::is_empty")]
    pub groups: Vec<String>,
}

/// Maximum number of names in one message.
const MOST_NAMED: usize = 8;

impl fmt::Display for LeaseAccess {
    /// Writes the names: `user anna, group ml`. Writes at most 8 names.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let users = self.users.iter().map(|name| format!("user {name}"));
        let groups = self.groups.iter().map(|name| format!("group {name}"));
        let names: Vec<String> = users.chain(groups).collect();
        f.write_str(&names[..names.len().min(MOST_NAMED)].join(", "))?;
        match names.len().saturating_sub(MOST_NAMED) {
            0 => Ok(()),
            more => write!(f, " and {more} more"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_list_of_names_is_shortened() {
        let names = |range: std::ops::Range<u32>| range.map(|n| format!("u{n}")).collect();
        let access = LeaseAccess { users: names(0..2), groups: vec!["ml".to_owned()] };
        assert_eq!(access.to_string(), "user u0, user u1, group ml");
        let many = LeaseAccess { users: names(0..11), groups: Vec::new() };
        assert!(many.to_string().ends_with("user u7 and 3 more"), "{many}");
    }
}

//! Reads the recorded hours of a period.

use gpush_store::{HoursPage, StoreError, View};

use super::Usage;

/// Number of hours that are read at once.
pub(super) const PAGE: usize = 1000;

/// Reads hours page by page, so that changes can be recorded between two pages.
pub(super) async fn pages<R: Send + 'static>(
    usage: &Usage,
    mut page: HoursPage,
    read: fn(&View<'_>, HoursPage) -> Result<Vec<R>, StoreError>,
    number: fn(&R) -> u64,
) -> Result<Vec<R>, StoreError> {
    let mut all = Vec::new();
    loop {
        let rows = usage.0.context.store.read(move |view| read(view, page)).await?;
        let is_last = rows.len() < page.limit;
        page.number = rows.last().map_or(0, |row| number(row) + 1);
        all.extend(rows);
        if is_last {
            return Ok(all);
        }
    }
}

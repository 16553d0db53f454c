//! Indexes of GPUs as selectors.

use gpush_api::GpuIndex;

/// Formats indexes as selectors: 0, 1, 2 and 5 become `0-2` and `5`. Combines only neighbours, so sort the indexes first.
#[must_use]
pub fn ranges(indexes: impl IntoIterator<Item = GpuIndex>) -> Vec<String> {
    let mut spans: Vec<(GpuIndex, GpuIndex)> = Vec::new();
    for index in indexes {
        match spans.last_mut() {
            Some((_, last)) if last.0.checked_add(1) == Some(index.0) => *last = index,
            Some(_) | None => spans.push((index, index)),
        }
    }
    spans
        .iter()
        .map(|(first, last)| if first == last { first.to_string() } else { format!("{first}-{last}") })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_become_a_range() {
        assert_eq!(ranges([0, 1, 2, 5].map(GpuIndex)), ["0-2", "5"]);
        assert_eq!(ranges([GpuIndex(u32::MAX)]), [u32::MAX.to_string()]);
        assert_eq!(ranges([]), [""; 0]);
    }
}

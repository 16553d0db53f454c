//! Splits an amount into whole parts.

/// Splits `total` in proportion to the weights, by largest remainder. The parts add up to `total`, unless all weights
/// are 0: then all parts are 0. Of equal remainders, the first gets the next unit.
///
/// `total` times the sum of the weights must be below 2^128.
#[must_use]
pub fn split(total: u64, weights: &[u128]) -> Vec<u64> {
    let sum: u128 = weights.iter().sum();
    if sum == 0 {
        return vec![0; weights.len()];
    }
    let share = |weight: &u128| (u128::from(total) * weight / sum, u128::from(total) * weight % sum);
    let shares: Vec<(u128, u128)> = weights.iter().map(share).collect();
    let mut parts: Vec<u64> = shares.iter().map(|(whole, _)| u64::try_from(*whole).unwrap_or(total)).collect();
    let left = total - parts.iter().sum::<u64>();
    let mut order: Vec<usize> = (0..weights.len()).collect();
    order.sort_by_key(|index| std::cmp::Reverse(shares[*index].1));
    for index in order.into_iter().take(usize::try_from(left).unwrap_or(usize::MAX)) {
        parts[index] += 1;
    }
    parts
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn remainder_goes_to_the_largest_fractions() {
        assert_eq!(split(10, &[1, 1, 1]), [4, 3, 3]);
        assert_eq!(split(10, &[1, 2, 3]), [2, 3, 5]);
        assert_eq!(split(7, &[0, 0]), [0, 0]);
        assert_eq!(split(7, &[]), Vec::<u64>::new());
        assert_eq!(split(0, &[3]), [0]);
    }

    proptest! {
        #[test]
        fn parts_add_up_and_are_within_one_of_their_proportion(
            total in 0..=1_000_000_000_000_u64,
            weights in prop::collection::vec(0..=u128::from(u64::MAX), 1..12),
        ) {
            let parts = split(total, &weights);
            let sum: u128 = weights.iter().sum();
            prop_assume!(sum > 0);
            prop_assert_eq!(parts.iter().sum::<u64>(), total);
            for (part, weight) in parts.iter().zip(&weights) {
                let exact = u128::from(total) * weight;
                prop_assert!(u128::from(*part) * sum < exact + sum && (u128::from(*part) + 1) * sum > exact);
                prop_assert!(*weight > 0 || *part == 0);
            }
        }
    }
}

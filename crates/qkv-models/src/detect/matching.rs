//! Minimum-cost matching: gives each target its own candidate so that the sum of costs is least (Kuhn 1955, Munkres
//! 1957; by shortest augmenting paths with potentials, O(n²m)).

/// For each of `rows` targets, the candidate among `columns` that it is matched with. Costs are `[rows, columns]`;
/// non-finite ones count as very large. There are at least as many candidates as targets.
///
/// # Panics
/// If there are fewer candidates than targets, or not exactly one cost per pair.
pub(crate) fn cheapest(costs: &[f64], rows: usize, columns: usize) -> Vec<usize> {
    assert!(rows <= columns && costs.len() == rows * columns, "{rows} targets of {columns} candidates");
    let cost = |row: usize, column: usize| {
        let found = costs[(row - 1) * columns + column - 1];
        if found.is_finite() { found } else { 1e12 }
    };
    // Rows and columns are counted from 1; 0 is where a path starts.
    let (mut of_rows, mut of_columns) = (vec![0.0; rows + 1], vec![0.0; columns + 1]);
    let mut matched = vec![0; columns + 1];
    for row in 1..=rows {
        matched[0] = row;
        let (mut least, mut before) = (vec![f64::INFINITY; columns + 1], vec![0; columns + 1]);
        let (mut visited, mut column) = (vec![false; columns + 1], 0);
        // Extend a path from the new row until it reaches a free column.
        while matched[column] != 0 {
            visited[column] = true;
            let from = matched[column];
            let (mut step, mut next) = (f64::INFINITY, 0);
            for to in 1..=columns {
                if visited[to] {
                    continue;
                }
                let reduced = cost(from, to) - of_rows[from] - of_columns[to];
                if reduced < least[to] {
                    (least[to], before[to]) = (reduced, column);
                }
                if least[to] < step {
                    (step, next) = (least[to], to);
                }
            }
            for to in 0..=columns {
                if visited[to] {
                    of_rows[matched[to]] += step;
                    of_columns[to] -= step;
                } else {
                    least[to] -= step;
                }
            }
            column = next;
        }
        // Along the path, each column takes over the row of the column before it.
        while column != 0 {
            matched[column] = matched[before[column]];
            column = before[column];
        }
    }
    let mut found = vec![0; rows];
    for column in 1..=columns {
        if matched[column] != 0 {
            found[matched[column] - 1] = column - 1;
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::draws::Draws;

    /// The least sum, by trying everything.
    fn least(costs: &[f64], rows: usize, columns: usize, row: usize, taken: &mut Vec<bool>) -> f64 {
        if row == rows {
            return 0.0;
        }
        let mut best = f64::INFINITY;
        for column in 0..columns {
            if !taken[column] {
                taken[column] = true;
                best = best.min(costs[row * columns + column] + least(costs, rows, columns, row + 1, taken));
                taken[column] = false;
            }
        }
        best
    }

    #[test]
    fn no_matching_is_cheaper() {
        let mut draws = Draws::new(7, [1, 1, 1]);
        for case in 0..400 {
            let columns = 1 + draws.below(6);
            let rows = draws.below(columns + 1);
            // Every other case has many equal costs.
            let cost = |draws: &mut Draws| {
                if case % 2 == 0 { draws.unit() * 10.0 - 5.0 } else { draws.below(3) as f64 }
            };
            let costs: Vec<f64> = (0..rows * columns).map(|_| cost(&mut draws)).collect();
            let found = cheapest(&costs, rows, columns);
            let mut taken = vec![false; columns];
            for &column in &found {
                assert!(!std::mem::replace(&mut taken[column], true), "each candidate once");
            }
            let sum: f64 = found.iter().enumerate().map(|(row, column)| costs[row * columns + column]).sum();
            let best = least(&costs, rows, columns, 0, &mut vec![false; columns]);
            assert!((sum - best).abs() < 1e-9, "{sum} for {best}: {rows} × {columns}");
        }
    }

    #[test]
    fn costs_that_are_not_numbers_are_avoided() {
        assert_eq!(cheapest(&[f64::NAN, 2.0, f64::INFINITY, 1.0], 2, 2), [0, 1]);
        assert_eq!(cheapest(&[], 0, 3), Vec::<usize>::new());
    }
}

//! A summary of the ratios: the geometric mean of each group of cases, and the worst case.

use super::case::Direction;
use super::measurement::Measurement;
use super::statistics::geometric_mean;
use super::table::{Column, Table};
use crate::dtype::Precision;

/// Shorter bf16 backward cases are left out: PyTorch is several times slower there, which would flatter the mean.
const LONG_ENOUGH: usize = 512;

/// Cases that are summarized together.
struct Group {
    precision: Precision,
    direction: Direction,
}

impl Group {
    fn name(&self) -> String {
        let name = format!("{} {}", self.precision.name(), self.direction.name());
        if self.only_long() { format!("{name}, n ≥ {LONG_ENOUGH}") } else { name }
    }

    fn only_long(&self) -> bool {
        self.precision == Precision::Bf16 && self.direction == Direction::Backward
    }

    fn holds(&self, row: &Measurement) -> bool {
        row.case.precision == self.precision
            && row.case.direction == self.direction
            && (!self.only_long() || row.case.shape.n >= LONG_ENOUGH)
    }
}

/// The summary of the ratios; empty without any.
pub(crate) fn summary(rows: &[Measurement], rounds: usize, markdown: bool) -> String {
    let ratio = |row: &Measurement| row.ratio.map(|ratio| (ratio, row.case));
    let worst = rows.iter().filter_map(ratio).min_by(|(a, _), (b, _)| a.total_cmp(b));
    let Some((worst, case)) = worst else { return String::new() };
    let columns = vec![Column::words("group", 24), Column::numbers("cases"), Column::numbers("ratio")];
    let table = Table::new(columns, markdown);
    let mut text =
        format!("\nPyTorch's time over ours, the geometric mean of the medians of {rounds} alternating rounds:\n\n");
    text += &table.header();
    for direction in Direction::ALL {
        for precision in Precision::ALL {
            let group = Group { precision, direction };
            let ratios: Vec<f64> = rows.iter().filter(|row| group.holds(row)).filter_map(|row| row.ratio).collect();
            if let Some(mean) = geometric_mean(ratios.iter().copied()) {
                text += &table.row(&[group.name(), ratios.len().to_string(), format!("{mean:.2}")]);
            }
        }
    }
    text + &format!("\nThe worst case: {worst:.2}, {case}\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::bench::case::Case;
    use crate::commands::bench::peaks::Peak;
    use crate::commands::bench::shape::Shape;
    use crate::commands::bench::timing::Timing;

    fn row(precision: Precision, direction: Direction, n: usize, ratio: f64) -> Measurement {
        let case = Case { shape: Shape::new([1, 1, 1, n, n, 8]), precision, causal: false, direction };
        let ms = |ms| Timing { best_ms: ms, median_ms: ms };
        Measurement::new(case, ms(1.0), &Peak::of(case, 1)).against(ms(ratio), ratio)
    }

    #[test]
    fn groups_have_their_geometric_means_and_the_worst_case_its_name() {
        let rows = [
            row(Precision::F32, Direction::Forward, 64, 1.0),
            row(Precision::F32, Direction::Forward, 128, 4.0),
            row(Precision::Bf16, Direction::Backward, 128, 0.5),
            row(Precision::Bf16, Direction::Backward, 512, 3.0),
        ];
        let text = summary(&rows, 5, true);
        assert!(text.contains("| f32 forward | 2 | 2.00 |"), "{text}");
        assert!(text.contains("| bf16 backward, n ≥ 512 | 1 | 3.00 |"), "{text}");
        assert!(text.ends_with("The worst case: 0.50, 1,1,1,128,128,8 bf16 full backward\n"), "{text}");
    }

    #[test]
    fn without_ratios_there_is_no_summary() {
        assert_eq!(summary(&[], 5, false), "");
    }
}

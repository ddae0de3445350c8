//! Tables, aligned for a terminal or in Markdown. Widths are fixed before the first row, so that each row can be
//! printed as soon as it is measured.

use std::fmt::Write;

/// A column.
#[derive(Clone, Debug)]
pub(crate) struct Column {
    pub title: String,
    /// The width of the widest cell.
    pub width: usize,
    /// Numbers are right-aligned.
    pub number: bool,
}

impl Column {
    pub fn words(title: &str, width: usize) -> Column {
        Column { title: title.into(), width, number: false }
    }

    pub fn numbers(title: &str) -> Column {
        Column { title: title.into(), width: 9, number: true }
    }
}

/// A table that is written row by row.
#[derive(Debug)]
pub(crate) struct Table {
    columns: Vec<Column>,
    markdown: bool,
}

impl Table {
    pub fn new(columns: Vec<Column>, markdown: bool) -> Table {
        Table { columns, markdown }
    }

    /// The titles, and in Markdown the rule below them.
    pub fn header(&self) -> String {
        let titles: Vec<String> = self.columns.iter().map(|column| column.title.clone()).collect();
        let mut header = self.row(&titles);
        if self.markdown {
            let rule = |column: &Column| if column.number { "---: |" } else { "--- |" };
            let rules: Vec<&str> = self.columns.iter().map(rule).collect();
            header += &format!("| {}\n", rules.join(" "));
        }
        header
    }

    /// One row.
    pub fn row(&self, cells: &[String]) -> String {
        if self.markdown {
            return format!("| {} |\n", cells.join(" | "));
        }
        let mut line = String::new();
        for (column, cell) in self.columns.iter().zip(cells) {
            let width = column.width.max(column.title.chars().count());
            let space = " ".repeat(width.saturating_sub(cell.chars().count()));
            let (before, after) = if column.number { (&space[..], "") } else { ("", &space[..]) };
            let _ = write!(line, "{before}{cell}{after}  "); // writing to a string cannot fail
        }
        line.truncate(line.trim_end().len());
        line + "\n"
    }
}

/// Milliseconds with about three significant digits.
pub(crate) fn time(ms: f64) -> String {
    match ms {
        100.0.. => format!("{ms:.0}"),
        10.0.. => format!("{ms:.1}"),
        1.0.. => format!("{ms:.2}"),
        _ => format!("{ms:.3}"),
    }
}

/// A rate with about three significant digits.
pub(crate) fn speed(x: f64) -> String {
    if x >= 100.0 { format!("{x:.0}") } else { format!("{x:.1}") }
}

/// A fraction as a percentage.
pub(crate) fn share(x: f64) -> String {
    format!("{:.0} %", x * 100.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(markdown: bool) -> Table {
        Table::new(vec![Column::words("what", 6), Column::numbers("ms")], markdown)
    }

    #[test]
    fn words_are_left_aligned_and_numbers_right_aligned() {
        let table = table(false);
        assert_eq!(table.header(), "what           ms\n");
        assert_eq!(table.row(&["abc".into(), "1.50".into()]), "abc          1.50\n");
    }

    #[test]
    fn markdown_has_a_rule_below_its_header() {
        let table = table(true);
        assert_eq!(table.header(), "| what | ms |\n| --- | ---: |\n");
        assert_eq!(table.row(&["abc".into(), "1.50".into()]), "| abc | 1.50 |\n");
    }

    #[test]
    fn numbers_have_about_three_significant_digits() {
        assert_eq!([0.0123, 1.234, 12.34, 1234.5].map(time), ["0.012", "1.23", "12.3", "1234"]);
        assert_eq!([1.26, 345.6].map(speed), ["1.3", "346"]);
        assert_eq!(share(0.756), "76 %");
    }
}

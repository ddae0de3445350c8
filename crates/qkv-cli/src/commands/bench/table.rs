//! Rows as a table, aligned for a terminal or in Markdown. Its widths are known before the first row, so that each row can
//! be shown when it is there.

use std::fmt::Write;

/// A column: its title, and whether numbers stand in it.
#[derive(Clone, Debug)]
pub(crate) struct Column {
    pub title: String,
    /// The most that a cell takes.
    pub width: usize,
    /// Numbers stand at the right.
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

    /// What stands above the rows.
    pub fn head(&self) -> String {
        let titles: Vec<String> = self.columns.iter().map(|column| column.title.clone()).collect();
        let mut head = self.row(&titles);
        if self.markdown {
            let rule = |column: &Column| if column.number { "---: |" } else { "--- |" };
            let rules: Vec<&str> = self.columns.iter().map(rule).collect();
            head += &format!("| {}\n", rules.join(" "));
        }
        head
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

/// A time, with about three digits that mean something.
pub(crate) fn time(ms: f64) -> String {
    match ms {
        100.0.. => format!("{ms:.0}"),
        10.0.. => format!("{ms:.1}"),
        1.0.. => format!("{ms:.2}"),
        _ => format!("{ms:.3}"),
    }
}

/// A speed likewise.
pub(crate) fn speed(x: f64) -> String {
    if x >= 100.0 { format!("{x:.0}") } else { format!("{x:.1}") }
}

/// A share as a percentage.
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
    fn words_stand_left_and_numbers_right() {
        let table = table(false);
        assert_eq!(table.head(), "what           ms\n");
        assert_eq!(table.row(&["abc".into(), "1.50".into()]), "abc          1.50\n");
    }

    #[test]
    fn markdown_has_a_rule_under_its_head() {
        let table = table(true);
        assert_eq!(table.head(), "| what | ms |\n| --- | ---: |\n");
        assert_eq!(table.row(&["abc".into(), "1.50".into()]), "| abc | 1.50 |\n");
    }

    #[test]
    fn numbers_have_the_digits_that_mean_something() {
        assert_eq!([0.0123, 1.234, 12.34, 1234.5].map(time), ["0.012", "1.23", "12.3", "1234"]);
        assert_eq!([1.26, 345.6].map(speed), ["1.3", "346"]);
        assert_eq!(share(0.756), "76 %");
    }
}

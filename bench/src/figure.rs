//! One figure: ours, its floor, the bound it must keep, and how it is shown.

use serde_json::{Value, json};

/// One measured figure.
pub(crate) struct Figure {
    pub(crate) name: String,
    pub(crate) unit: Unit,
    pub(crate) ours: f64,
    /// The same work without taskonce, where there is such a thing.
    pub(crate) floor: Option<f64>,
    /// What is held against the bound.
    pub(crate) judged: Judged,
    pub(crate) bound: Bound,
    /// What else the run showed.
    pub(crate) notes: Vec<String>,
}

/// What is held against the bound.
#[derive(Clone, Copy)]
pub(crate) enum Judged {
    /// Ours by the floor: the median of the rounds' own ratios, since a round's two sides met the same machine.
    Ratio(f64),
    /// Ours itself.
    Ours,
}

/// What must be reached.
#[derive(Clone, Copy)]
pub(crate) enum Bound {
    AtMost(f64),
    AtLeast(f64),
    /// Nothing: it is shown.
    Shown,
}

/// What a figure counts.
#[derive(Clone, Copy)]
pub(crate) enum Unit {
    /// Nanoseconds, shown in the unit that fits.
    Nanos,
    PerSecond,
    Bytes,
    Count,
    /// A share of the whole, 1 being all of it.
    Share,
}

impl Unit {
    fn name(self) -> &'static str {
        match self {
            Unit::Nanos => "ns",
            Unit::PerSecond => "per_second",
            Unit::Bytes => "bytes",
            Unit::Count => "count",
            Unit::Share => "share",
        }
    }

    pub(crate) fn show(self, number: f64) -> String {
        match self {
            Unit::Nanos if number < 1e3 => format!("{number:.0} ns"),
            Unit::Nanos if number < 1e6 => format!("{:.1} µs", number / 1e3),
            Unit::Nanos => format!("{:.1} ms", number / 1e6),
            Unit::PerSecond => format!("{:.1} k/s", number / 1e3),
            Unit::Bytes => format!("{number:.0} B"),
            Unit::Count | Unit::Share => format!("{number:.2}"),
        }
    }
}

/// The table's columns.
const WIDTHS: [usize; 6] = [66, 11, 11, 7, 11, 0];

fn row(cells: [&str; 6]) -> String {
    let [name, ours, floor, ratio, bound, verdict] = WIDTHS;
    let line = format!(
        "{:<name$}{:>ours$}{:>floor$}{:>ratio$}{:>bound$}  {:<verdict$}",
        cells[0], cells[1], cells[2], cells[3], cells[4], cells[5]
    );
    line.trim_end().to_owned()
}

/// The head of the table.
pub(crate) fn head() -> String {
    row(["figure", "ours", "floor", "ratio", "bound", ""])
}

impl Figure {
    pub(crate) fn is_reached(&self) -> bool {
        let judged = match self.judged {
            Judged::Ratio(ratio) => ratio,
            Judged::Ours => self.ours,
        };
        match self.bound {
            Bound::AtMost(most) => judged <= most,
            Bound::AtLeast(least) => judged >= least,
            Bound::Shown => true,
        }
    }

    /// The figure's line of the table, and its notes below.
    pub(crate) fn lines(&self) -> String {
        let (ratio, show): (String, fn(Unit, f64) -> String) = match self.judged {
            Judged::Ratio(ratio) => (format!("{ratio:.2}"), |_, bound| format!("{bound:.2}")),
            Judged::Ours => (String::new(), Unit::show),
        };
        let bound = match self.bound {
            Bound::AtMost(most) => format!("≤ {}", show(self.unit, most)),
            Bound::AtLeast(least) => format!("≥ {}", show(self.unit, least)),
            Bound::Shown => String::new(),
        };
        let floor = self.floor.map_or_else(|| "-".to_owned(), |floor| self.unit.show(floor));
        let verdict = match self.bound {
            Bound::Shown => "",
            Bound::AtMost(_) | Bound::AtLeast(_) if self.is_reached() => "ok",
            Bound::AtMost(_) | Bound::AtLeast(_) => "MISSED",
        };
        let mut lines = row([&self.name, &self.unit.show(self.ours), &floor, &ratio, &bound, verdict]);
        for note in &self.notes {
            lines.push_str("\n    ");
            lines.push_str(note);
        }
        lines
    }

    pub(crate) fn json(&self, bench: &str) -> Value {
        let (judged, ratio) = match self.judged {
            Judged::Ratio(ratio) => ("ratio", Some(ratio)),
            Judged::Ours => ("ours", None),
        };
        let bound = match self.bound {
            Bound::AtMost(most) => json!({ "at_most": most }),
            Bound::AtLeast(least) => json!({ "at_least": least }),
            Bound::Shown => Value::Null,
        };
        json!({
            "bench": bench,
            "name": self.name,
            "unit": self.unit.name(),
            "ours": self.ours,
            "floor": self.floor,
            "ratio": ratio,
            "judged": judged,
            "bound": bound,
            "reached": self.is_reached(),
            "notes": self.notes,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figure(judged: Judged, bound: Bound) -> Figure {
        Figure {
            name: "a thing".into(),
            unit: Unit::Nanos,
            ours: 1_500.0,
            floor: Some(1_000.0),
            judged,
            bound,
            notes: vec!["a note".into()],
        }
    }

    #[test]
    fn a_bound_holds_up_to_and_including_its_limit() {
        assert!(figure(Judged::Ratio(1.5), Bound::AtMost(1.5)).is_reached());
        assert!(!figure(Judged::Ratio(1.51), Bound::AtMost(1.5)).is_reached());
        assert!(figure(Judged::Ratio(1.5), Bound::AtLeast(1.5)).is_reached());
        assert!(!figure(Judged::Ratio(1.49), Bound::AtLeast(1.5)).is_reached());
        assert!(!figure(Judged::Ours, Bound::AtMost(1_499.0)).is_reached());
        let shown = figure(Judged::Ratio(9.9), Bound::Shown);
        assert!(shown.is_reached() && !shown.lines().contains("ok") && shown.json("x")["bound"].is_null());
    }

    #[test]
    fn a_miss_is_shown_as_one() {
        let missed = figure(Judged::Ratio(1.5), Bound::AtMost(1.2));
        assert!(missed.lines().contains("1.5 µs") && missed.lines().contains("MISSED"), "{}", missed.lines());
        assert_eq!(missed.json("x")["reached"], false);
        assert!(figure(Judged::Ratio(1.0), Bound::AtMost(1.2)).lines().contains("ok"));
    }
}

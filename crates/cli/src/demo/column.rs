//! The four ways to handle a delivery.

/// A column of the demo's table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Column {
    /// Mark the task with a time to live before the work, and drop what is marked.
    Recipe,
    /// taskonce, with an effect that may be repeated.
    Repeatable,
    /// taskonce, with an effect whose provider deduplicates on a key.
    Keyed,
    /// taskonce, with an effect that is written in the transaction that completes the task.
    Transactional,
}

impl Column {
    pub(crate) const ALL: [Column; 4] = [Column::Recipe, Column::Repeatable, Column::Keyed, Column::Transactional];

    /// Its name in JSON, in file names and to the workers.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Column::Recipe => "recipe",
            Column::Repeatable => "repeatable",
            Column::Keyed => "keyed",
            Column::Transactional => "transactional",
        }
    }

    pub(crate) fn from_name(name: &str) -> Option<Column> {
        Column::ALL.into_iter().find(|column| column.name() == name)
    }

    /// Its head in the table.
    pub(crate) fn title(self) -> &'static str {
        match self {
            Column::Recipe => "usual recipe\n(mark, drop)",
            Column::Repeatable => "taskonce\nrepeatable",
            Column::Keyed => "taskonce\nkeyed",
            Column::Transactional => "taskonce\ntransactional",
        }
    }

    /// Its name in the progress bar.
    pub(crate) fn short(self) -> &'static str {
        match self {
            Column::Recipe => "usual recipe",
            Column::Repeatable => "taskonce, repeatable",
            Column::Keyed => "taskonce, keyed",
            Column::Transactional => "taskonce, one commit",
        }
    }
}

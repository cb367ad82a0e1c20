//! What can be said of a route: `Settings`, one layer of the table, in which everything may be left open.
//!
//! How layers become a route is in `resolve`.

use std::fmt;
use std::time::Duration;

use taskonce_core::json::Fields;
use taskonce_core::key::Name;
use taskonce_core::policy::Effect;
use taskonce_core::units;

macro_rules! settings {
    ($($(#[doc = $doc:literal])+ $field:ident: $type:ty,)+) => {
        /// One layer of the table. What is `None` is inherited: from the handler, the source, the defaults, and last from
        /// what stands here as the default. `Some(None)`, in a file `"none"`, takes an inherited limit away.
        ///
        /// ```
        /// use std::time::Duration;
        /// use taskonce_worker::routes::Settings;
        /// # use taskonce_core::policy::Effect;
        ///
        /// let settings = Settings {
        ///     effect: Some(Effect::Keyed),
        ///     run_max: Some(Some(Duration::from_secs(20))),
        ///     ..Settings::default()
        /// };
        /// # assert_eq!(settings.names(), ["effect", "run_max"]);
        /// ```
        #[derive(Clone, Debug, Default, PartialEq)]
        pub struct Settings {
            $($(#[doc = $doc])+ pub $field: Option<$type>,)+
        }

        impl Settings {
            /// The name of every setting, as a file has it.
            pub const NAMES: &'static [&'static str] = &[$(stringify!($field)),+];

            /// The names of those that are said here.
            #[must_use]
            pub fn names(&self) -> Vec<&'static str> {
                let mut names = Vec::new();
                $(if self.$field.is_some() { names.push(stringify!($field)); })+
                names
            }

            /// These, and where they say nothing what was said before.
            #[must_use]
            pub fn over(&self, before: &Settings) -> Settings {
                Settings { $($field: self.$field.clone().or_else(|| before.$field.clone()),)+ }
            }
        }
    };
}

settings! {
    /// The namespace of the keys. Default `default`.
    namespace: Name,
    /// What kind of effect the handler has. There is no default: every route needs one.
    effect: Effect,
    /// How long a claim holds without a heartbeat; at least 500 ms. Default 30 s.
    lease: Duration,
    /// How long a handler may run. Default: no limit.
    run_max: Option<Duration>,
    /// How long a record stays after its last write. Default 14 days.
    retention: Duration,
    /// How long an output stays, at most as long as its record. Default 24 h.
    output_retention: Duration,
    /// The largest output that is kept, in bytes; zero keeps none. Default 1 MiB.
    output_max: usize,
    /// Accepts a store that may forget, for an unrepeatable or fenced effect. Default `false`.
    store_may_forget: bool,
    /// The most attempts. Default 5.
    attempts_max: u32,
    /// The attempt at which a failure for good is the end. Default 1.
    permanent_attempts_max: u32,
    /// The attempt at which a handler that ran longer than `run_max` is the end. Default: `attempts_max`.
    poison_attempts_max: Option<u32>,
    /// The most claims that may end by a passed lease; then the task is parked. Default 3.
    crashes_max: u32,
    /// The most that the first delay after a failure can be. Default 1 s.
    backoff_min: Duration,
    /// The most that any delay can be. Default 10 min.
    backoff_max: Duration,
    /// What the most grows by per attempt, at least 1. Default 2.
    backoff_factor: f64,
    /// The most that run at once in a process. Default 16.
    concurrency_max: u32,
    /// The most starts in a time, in a process. Default: no limit.
    rate: Option<Rate>,
    /// How many starts may come at once after a pause, under a `rate`. Default: what the rate gives in a second, at least 1.
    rate_burst: u32,
    /// After so many failures in a row the route is paused. Default 20; none: never.
    breaker_failures: Option<u32>,
    /// How long it is paused before one task at a time is tried. Default 30 s.
    breaker_pause: Duration,
    /// How many turns the route has where one of weight 1 has one, at most 1000. Default 1.
    weight: u32,
    /// What becomes of a delivery while the store is away. Default: it waits.
    store_away: StoreAway,
    /// What becomes of a delivery without a key. Default: it is refused.
    without_key: WithoutKey,
}

/// What becomes of a delivery while the store is away.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum StoreAway {
    /// It is deferred, and no attempt is counted: nothing runs unguarded.
    #[default]
    Closed,
    /// Its handler runs unguarded, and that is counted: duplicates run too. Refused for effects that need the record.
    Open,
}

impl StoreAway {
    /// Both.
    pub const ALL: [StoreAway; 2] = [StoreAway::Closed, StoreAway::Open];

    /// The word for it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            StoreAway::Closed => "closed",
            StoreAway::Open => "open",
        }
    }
}

/// What becomes of a delivery that came without a key.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum WithoutKey {
    /// It goes to the dead letters.
    #[default]
    Refuse,
    /// The broker's own name for it is its id: the same at each arrival, but another for each sending, so a producer that
    /// sends twice runs twice.
    Coordinates,
    /// Its id is derived from these fields of its payload.
    Derive(Fields),
}

impl WithoutKey {
    /// The word for it.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            WithoutKey::Refuse => "refuse",
            WithoutKey::Coordinates => "coordinates",
            WithoutKey::Derive(_) => "derive",
        }
    }
}

/// So many starts in a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Rate {
    /// How many, at least 1.
    pub starts: u32,
    /// In which time, more than zero.
    pub per: Duration,
}

impl Rate {
    /// So many a second.
    #[must_use]
    pub const fn per_second(starts: u32) -> Rate {
        Rate { starts, per: Duration::from_secs(1) }
    }

    /// Reads `50/s`, `600/m`, `10/h`.
    ///
    /// # Errors
    /// What is wrong with it and how one is written, for a message.
    pub fn parse(text: &str) -> Result<Rate, String> {
        let form = "write a whole number, `/` and one of `s`, `m`, `h`, `d`, such as `50/s` or `600/m`";
        let (starts, unit) = text.split_once('/').ok_or_else(|| format!("this is no rate; {form}"))?;
        let per = match unit {
            "s" | "m" | "h" | "d" => units::duration(&format!("1{unit}"))?,
            _ => return Err(format!("this is no rate; {form}")),
        };
        let is_number = !starts.is_empty() && starts.bytes().all(|byte| byte.is_ascii_digit());
        match starts.parse() {
            Ok(starts) if is_number => Ok(Rate { starts, per }),
            Ok(_) | Err(_) => Err(format!("this is no rate; {form}")),
        }
    }

    /// What it gives in a second, at least 1: how many may come at once where nothing else is said.
    #[must_use]
    pub fn burst(self) -> u32 {
        let in_a_second = u128::from(self.starts) * 1_000_000_000 / self.per.as_nanos().max(1);
        u32::try_from(in_a_second).unwrap_or(u32::MAX).max(1)
    }
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let per = units::written(self.per);
        write!(f, "{}/{}", self.starts, per.strip_prefix('1').filter(|unit| unit.len() == 1).unwrap_or(&per))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_written_as_it_is_read() {
        for text in ["50/s", "600/m", "1/h", "7/d"] {
            assert_eq!(Rate::parse(text).map(|rate| rate.to_string()), Ok(text.to_owned()));
        }
        for bad in ["", "50", "50/", "/s", "+5/s", "5/ms", "5/2s", "-1/s", "1.5/s", "99999999999/s"] {
            assert!(Rate::parse(bad).is_err(), "{bad}");
        }
        assert_eq!((Rate::per_second(50).burst(), Rate::parse("90/m").unwrap().burst()), (50, 1));
    }

    #[test]
    fn what_a_layer_leaves_open_is_taken_from_the_one_before() {
        let before = Settings { weight: Some(2), run_max: Some(Some(Duration::from_secs(1))), ..Settings::default() };
        let layer = Settings { run_max: Some(None), attempts_max: Some(3), ..Settings::default() };
        let both = layer.over(&before);
        assert_eq!((both.weight, both.run_max, both.attempts_max), (Some(2), Some(None), Some(3)));
        assert_eq!(both.names(), ["run_max", "attempts_max", "weight"]);
        assert_eq!(Settings::NAMES.len(), 23);
    }
}

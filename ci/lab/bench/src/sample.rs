//! A program's samples, one line for each operation: words between tabs.

use crate::Failure;
use std::fmt;
use std::str::FromStr;

/// One way of doing one operation, measured several times.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    /// The operation's name.
    pub operation: String,
    /// Which interface of the program's library, and how it was set up.
    pub way: String,
    /// The cost of each run, in the unit of the suite.
    pub runs: Vec<f64>,
}

impl fmt::Display for Sample {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sample\t{}\t{}", self.operation, self.way)?;
        self.runs.iter().try_for_each(|run| write!(f, "\t{run}"))
    }
}

impl FromStr for Sample {
    type Err = Failure;

    fn from_str(line: &str) -> Result<Self, Failure> {
        let mut words = line.split('\t');
        let (Some("sample"), Some(operation), Some(way)) =
            (words.next(), words.next(), words.next())
        else {
            return Err(format!("no sample: {line:?}").into());
        };
        let runs = words.map(str::parse).collect::<Result<Vec<f64>, _>>()?;
        Ok(Sample { operation: operation.into(), way: way.into(), runs })
    }
}

/// The samples in a program's output.
pub fn samples(output: &str) -> Result<Vec<Sample>, Failure> {
    output.lines().filter(|line| line.starts_with("sample\t")).map(str::parse).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_survive_their_line() {
        let sample = Sample {
            operation: "post one write".into(),
            way: "shared".into(),
            runs: vec![236.25, 240.0],
        };
        let output = format!("noise\n{sample}\nmore noise\n");
        assert_eq!(samples(&output).unwrap(), [sample]);
        assert!(samples("sample\tpost\tshared\tmany\n").is_err());
        assert!("post\tshared\t1".parse::<Sample>().is_err());
    }
}

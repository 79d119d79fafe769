"""Intervals and the machinery behind them; nobody else in trueup computes one."""

from trueup.stats.bootstrap import bootstrap_totals, percentile_interval
from trueup.stats.clusters import ClusterSums
from trueup.stats.logbins import LogBins, quantile_groups, top_share
from trueup.stats.ratio import ClusterMean, cluster_mean

__all__ = [
    "ClusterMean",
    "ClusterSums",
    "LogBins",
    "bootstrap_totals",
    "cluster_mean",
    "percentile_interval",
    "quantile_groups",
    "top_share",
]

"""One pass over all run branches: assess, publish, report, finish."""
